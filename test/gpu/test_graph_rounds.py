"""The CUDA-graph path on a toy model: graphs against eager, and no waiting for the device within a round."""

import dataclasses
import random

import pytest
import torch
from sglang_sparsespec.attention import obstacle
from sglang_sparsespec.config import SparseSpecConfig

CUDA = torch.cuda.is_available()
OBSTACLE = obstacle("fa3", "cuda" if CUDA else "cpu", torch.bfloat16, 64)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=f"no FA3: {OBSTACLE}")]

CONFIGS = {
    "lockstep": {},
    "unified": {"schedule": "unified"},
    "kv_head": {"index_scope": "kv_head"},
    "window": {"selector": "window"},
    "random": {"selector": "random"},
    "shared": {"score_layer_stride": 2, "score_every": 2, "schedule": "unified"},
    "fused": {"attention": "fused"},
    "triton": {"attention": "triton", "schedule": "unified"},
    "fused-kv_head": {"attention": "fused", "index_scope": "kv_head", "schedule": "unified"},
}


def make(config: SparseSpecConfig, *, graphs: bool, **model):
    from sglang_sparsespec.attention.fa3 import FA3Attention
    from sglang_sparsespec.attention.fused import FusedAttention
    from sglang_sparsespec.attention.triton_paged import TritonPagedAttention
    from toy_rounds import DIM, HEADS, KV_HEADS, Toy

    if config.attention == "fused":
        if reason := obstacle("fused", "cuda", torch.bfloat16, DIM):
            pytest.skip(reason)
        shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
        attention = FusedAttention(**shape, queries=config.stride + 1, device="cuda")
    elif config.attention == "triton":
        attention = TritonPagedAttention()
    else:
        attention = FA3Attention()
    return Toy(config, attention, graphs=graphs, device="cuda", **model)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_graphs_give_what_eager_micro_steps_give_while_the_batch_shrinks(name):
    config = dataclasses.replace(SparseSpecConfig(stride=4, min_tokens=32, draft_support=8), **CONFIGS[name])
    graphed, eager = make(config, graphs=True), make(config, graphs=False)
    rng = random.Random(3)
    pools = list(range(1, 7))
    while pools:
        for _ in range(3):
            rng.shuffle(pools)
            got, want = graphed.run(pools), eager.run(pools)
            if config.selector != "random":  # where the drafts are drawn alike
                assert got == want
        if config.selector != "random":
            assert torch.equal(graphed.state.selected_len, eager.state.selected_len)
        pools.pop()
    assert graphed.rounds.eager_micro_steps == 0
    assert eager.rounds.eager_micro_steps > 0


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("windows", [{}, {0: 40}, {0: 15, 2: 127}])
@pytest.mark.parametrize("name", ["lockstep", "unified", "fused", "triton", "fused-kv_head"])
def test_windows_and_sinks_give_in_graphs_what_they_give_without(name, windows, sinks):
    config = SparseSpecConfig(stride=4, min_tokens=32, draft_support=8)
    config = dataclasses.replace(config, **CONFIGS[name])
    graphed, eager = (make(config, graphs=on, windows=windows, sinks=sinks) for on in (True, False))
    for pools in ([1, 2, 3, 4, 5, 6], [5, 2], [3, 6, 1], [4]):
        assert graphed.run(pools) == eager.run(pools)
    assert graphed.rounds.eager_micro_steps == 0


@pytest.mark.parametrize("windows", [{}, {0: 40}, {0: 15, 2: 127}])
@pytest.mark.parametrize("name", ["lockstep", "fused", "triton"])
def test_drafts_see_windows_and_sinks_as_verifications_do(name, windows):
    """Where selections keep all, nearly every draft is right; none would be without a window or the sinks."""
    config = SparseSpecConfig(stride=4, min_tokens=32, draft_support=8, budget_ratio=1.0)
    config = dataclasses.replace(config, **CONFIGS[name])
    toy = make(config, graphs=True, windows=windows, sinks=True)
    lengths = [len(row) for _ in range(4) for row in toy.run([1, 2, 3, 4, 5, 6])]
    assert sum(lengths) >= 0.8 * 5 * len(lengths)


@pytest.mark.parametrize("name", ["lockstep", "fused", "kv_head"])
def test_rounds_of_any_number_of_drafts_give_what_eager_ones_give(name):
    config = SparseSpecConfig(stride=4, min_tokens=32, draft_support=8, adapt="on")
    config = dataclasses.replace(config, **CONFIGS[name])
    graphed, eager = make(config, graphs=True), make(config, graphs=False)
    times = graphed.rounds.graphs.measure()
    assert set(times) == {0, 1, 3, 5} and all(us > 0 for points in times.values() for _, us in points)
    graphed = make(config, graphs=True)
    rng = random.Random(4)
    for drafts in (4, 0, 0, 2, 1, 4, 3, 0, 4):
        pools = rng.sample(range(1, 7), rng.randint(1, 6))
        assert graphed.run(pools, drafts=drafts) == eager.run(pools, drafts=drafts)
    assert graphed.rounds.eager_micro_steps == 0


def test_a_sampled_round_does_not_wait_for_the_device_either():
    toy = make(SparseSpecConfig(stride=4, min_tokens=32, draft_support=8), graphs=True)
    for _ in range(3):
        rows = toy.run([2, 5, 6], greedy=False)
        assert all(1 <= len(row) <= 5 for row in rows)
    assert toy.rounds.eager_micro_steps == 0


@pytest.mark.parametrize("name", ["lockstep", "fused"])
@pytest.mark.parametrize("greedy", [True, False])
def test_filled_rounds_give_what_eager_ones_give_and_wait_for_nothing(name, greedy):
    config = SparseSpecConfig(stride=4, min_tokens=32, draft_support=8, adapt="on", lookup="on")
    config = dataclasses.replace(config, **CONFIGS[name])
    graphed, eager = make(config, graphs=True), make(config, graphs=False)
    torch.manual_seed(6)
    past = torch.randint(0, 6, graphed.rounds.rounds.history.shape, dtype=torch.int32)
    for toy in (graphed, eager):
        toy.rounds.rounds.history.copy_(past)
        for pool in range(1, 7):
            toy.rounds.rounds.history[pool, toy.committed[pool]] = pool
    rng = random.Random(4)
    for drafts, total in ((1, 4), (1, 2), (4, None), (2, 4), (0, None), (3, 4)) * 2:
        pools = rng.sample(range(1, 7), rng.randint(1, 6))
        got = graphed.run(pools, drafts=drafts, total=total, greedy=greedy)
        assert all(1 <= len(row) <= (total or drafts) + 1 for row in got)
        if greedy:
            assert got == eager.run(pools, drafts=drafts, total=total)
            assert torch.equal(graphed.rounds.rounds.history[1:], eager.rounds.rounds.history[1:])
    assert graphed.rounds.eager_micro_steps == 0


def test_starting_a_request_waits_for_nothing():
    state = make(SparseSpecConfig(stride=4, min_tokens=32), graphs=False).rounds.state
    pools, lengths = torch.tensor([2, 5], device="cuda"), torch.tensor([40, 7], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.begin_window(pools, lengths)
        state.begin(pools, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.selected_len[pools].tolist() == [0, 0] and state.committed[pools].tolist() == [40, 7]
