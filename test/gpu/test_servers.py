"""What only a server on a GPU shows: SGLang's memory saver, and its watch over the KV cache."""

import json
import random

import pytest
import requests
import torch
from farm import REASONER, generate, make_server, update_weights, wait_until_idle
from sglang_sparsespec._client import encode_prompts, load_problems

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = json.dumps({"stride": 4, "min_tokens": 16})


@pytest.fixture(scope="module")
def prompts():
    return encode_prompts(load_problems(REASONER.parent / "demo-prompts.jsonl")[:8], str(REASONER))


def used():
    """Bytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_that_is_released_comes_back_with_the_same_output(prompts, tmp_path):
    args = ("--enable-memory-saver", "--max-total-tokens", "1000000")  # 3 GiB of KV
    with make_server(REASONER, tmp_path / "saver.log", config=CONFIG, args=args) as server:
        before = generate(server, prompts, max_new_tokens=60)
        full = used()
        for _ in range(2):
            wait_until_idle(server)
            for what in ("release", "resume"):
                reply = requests.post(f"{server.url}/{what}_memory_occupation", json={}, timeout=120)
                assert reply.status_code == 200, reply.text[:300]
                if what == "release":
                    assert full - used() > 2 << 30
            update_weights(server, REASONER)
            after = generate(server, prompts, max_new_tokens=60)
            assert [one["output_ids"] for one in after] == [one["output_ids"] for one in before]
        assert all(one["meta_info"]["spec_verify_ct"] < 60 for one in after)


@pytest.mark.parametrize("schedule", ["auto", "unified"])
def test_the_kv_canary_finds_nothing(schedule, prompts, tmp_path):
    rng = random.Random(3)
    some = [rng.choice(prompts)[: rng.randrange(20, 200)] for _ in range(60)]
    config = json.dumps({"stride": 4, "min_tokens": 16, "schedule": schedule})
    args, env = ("--kv-canary", "raise", "--kv-canary-sweep-interval", "20"), {"SGLANG_TEST_RETRACT": "1"}
    with make_server(REASONER, tmp_path / "canary.log", config=config, args=args, env=env) as server:
        for _ in range(2):
            generate(server, some, max_new_tokens=[rng.randrange(1, 90) for _ in some])
        wait_until_idle(server)
        log = server.log_path.read_text(errors="replace").lower()
        assert "install_canary" in log and "scheduler hit an exception" not in log
