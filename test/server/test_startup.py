"""A server that cannot be right does not start: it says why, before weights load. An engine needs none."""

import pytest
from farm import REASONER, other_weights
from frontends import offline_engine, rollouts
from sglang_sparsespec._server import ServerError, ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

CASES = {
    "unknown-key": (["--sparsespec-config", '{"budget_ration": 0.1}'], ["budget_ration", "budget_ratio"]),
    "flags-disagree": (
        ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "9"],
        ["--speculative-num-steps", "--speculative-num-draft-tokens", "k + 1"],
    ),
    "mixed-chunk": (["--enable-mixed-chunk"], ["--enable-mixed-chunk", "SPARSESPEC"]),
}


@pytest.mark.parametrize("case", CASES)
def test_start_up_ends_with_the_reason(case):
    args, named = CASES[case]
    server = ServerProcess(
        REASONER, ["--dtype", "float32", "--speculative-algorithm", "SPARSESPEC", *args], timeout_s=300
    )
    with pytest.raises(ServerError) as caught, server:
        pass
    text = server.log_path.read_text(errors="replace")
    for word in named:
        assert word in str(caught.value) or word in text
    assert "Load weight begin" not in text
    server.log_path.unlink()


def test_the_offline_engine_speculates():
    found = offline_engine()
    assert len(found) == 2
    for text, tokens, verifications in found:
        assert text and 0 < verifications < tokens <= 40


def test_an_engine_takes_new_weights_as_tensors(tmp_path):
    before, new, from_disk, after = rollouts(other_weights(tmp_path / "other", seed=6))
    assert len(before) == 2
    assert before == after
    assert new == from_disk
    assert before != new
