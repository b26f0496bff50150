"""The CUDA-graph path on a toy model: graphs against eager, and no waiting for the device within a round."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from sglang_sparsespec.attention import fa3_obstacle
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.metrics import PhaseTimer
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlanner
from sglang_sparsespec.rounds.state import RequestState

OBSTACLE = fa3_obstacle("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, 128)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=f"no FA3: {OBSTACLE}")]
SLOTS, CONTEXT, LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 6, 600, 3, 8, 2, 64, 40


class Toy:
    """Attention layers over embedded tokens, and an output matrix: enough for every kernel of a round."""

    def __init__(self, config: SparseSpecConfig, *, graphs: bool) -> None:
        from sglang_sparsespec.attention.fa3 import FA3Attention
        from sglang_sparsespec.attention.fused import FusedAttention
        from sglang_sparsespec.rounds.device import DeviceRounds
        from sglang_sparsespec.rounds.graphs import plan_keys
        from sglang_sparsespec.rounds.kernels import load_kernels
        from sglang_sparsespec.rounds.replayed import ReplayedRounds

        torch.manual_seed(0)
        self.config = config
        rows = SLOTS + 1
        table = (torch.randperm(rows * CONTEXT, device="cuda").int() + 1).view(rows, CONTEXT)
        self.state = RequestState(
            rows=rows,
            stride=config.stride,
            support=8,
            layers=config.selection_groups(LAYERS),
            heads=1 if config.index_scope == "layer" else KV_HEADS,
            max_selected=config.budget(CONTEXT),
            device="cuda",
        )
        rounds = DeviceRounds(
            config=config,
            state=self.state,
            kernels=load_kernels("cuda"),
            attention=FusedAttention(
                heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, queries=config.stride + 1, device="cuda"
            )
            if config.attention == "fused"
            else FA3Attention(),
            req_to_token=table,
            slots=SLOTS,
            layers=LAYERS,
            heads=HEADS,
            score_capacity=SLOTS * CONTEXT,
        )
        shape = (LAYERS, rows * CONTEXT + 1, KV_HEADS, DIM)
        self.k, self.v = (torch.randn(shape, device="cuda").bfloat16() for _ in "kv")
        self.embed = torch.randn(VOCABULARY, HEADS * DIM, device="cuda").bfloat16()
        self.to_kv = torch.randn(HEADS * DIM, 2 * KV_HEADS * DIM, device="cuda").bfloat16() / 16
        generator = torch.Generator("cuda").manual_seed(1)
        keys, _ = plan_keys(
            [1, 2, 4, SLOTS] if graphs else [],
            stride=config.stride,
            schedule=config.schedule,
            score_every=config.score_every,
        )
        self.rounds = ReplayedRounds(config, rounds, self.forward, generator, PhaseTimer("cuda"), keys=keys)
        self.planner = RoundPlanner(config.stride, config.schedule)
        if graphs:
            capture(self.rounds.graphs)
        for pool in range(1, rows):
            self.state.begin_window(
                torch.tensor([pool], device="cuda"), torch.tensor([300 + 7 * pool], device="cuda")
            )
            self.state.tokens[pool, 0] = pool
        self.committed = {pool: 300 + 7 * pool for pool in range(1, rows)}

    def forward(self, step):
        b = step.buffers
        x = self.embed[b.input_ids] + torch.sin(b.positions[:, None] * 0.1).bfloat16()
        for index in range(LAYERS):
            k, v = (x @ self.to_kv).view(-1, 2, KV_HEADS, DIM).unbind(1)
            self.k[index][b.out_cache_loc], self.v[index][b.out_cache_loc] = k, v
            layer = LayerKV(index=index, k=self.k[index], v=self.v[index], scale=DIM**-0.5, heads=HEADS)
            out = self.rounds.rounds.attend(step, layer, x.view(-1, HEADS, DIM))
            x = x + out.reshape(len(x), -1)
        return x.float() @ self.embed.float().T

    def run(self, pools: list[int], *, greedy: bool = True):
        info = SimpleNamespace(
            temperatures=torch.full((len(pools), 1), 1.0, device="cuda"),
            top_ks=torch.full((len(pools),), 1 if greedy else 1 << 30, device="cuda"),
            top_ps=torch.ones(len(pools), device="cuda"),
            min_ps=torch.zeros(len(pools), device="cuda"),
            is_all_greedy=greedy,
            need_top_k_sampling=False,
            need_top_p_sampling=False,
            need_min_p_sampling=False,
            is_any_greedy=greedy,
        )
        batch = SimpleNamespace(
            seq_lens=torch.tensor([self.committed[p] for p in pools], device="cuda"),
            req_pool_indices=torch.tensor(pools, device="cuda"),
            sampling_info=info,
        )
        keys = [RequestKey(pool, 0) for pool in pools]
        plan = self.planner.plan_round(keys)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # any wait for the device within the round raises
        try:
            outcome = self.rounds.run(batch, keys, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        lengths = outcome.lengths.tolist()
        for pool, length in zip(pools, lengths, strict=True):
            self.committed[pool] += length
        assert outcome.committed.tolist() == [self.committed[p] for p in pools]
        return [row[:n] for row, n in zip(outcome.tokens.tolist(), lengths, strict=True)]


def capture(graphs) -> None:
    """As `MicroStepGraphs.capture` does within SGLang, without it."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for key in graphs._keys:
        step = graphs.rounds.step(key.nd, key.nv, scored=key.scored)
        for _ in range(2):
            with torch.cuda.stream(stream):
                graphs.rounds.flat_table.zero_()
                graphs._run(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = graphs._run(step)
        graphs._graphs[key] = (graph, out)
    graphs.rounds.reset()


CONFIGS = {
    "lockstep": {},
    "unified": {"schedule": "unified"},
    "kv_head": {"index_scope": "kv_head"},
    "window": {"selector": "window"},
    "fused": {"attention": "fused"},
    "fused-kv_head": {"attention": "fused", "index_scope": "kv_head", "schedule": "unified"},
    "shared": {"score_layer_stride": 2, "score_every": 2, "schedule": "unified"},
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_graphs_give_what_eager_micro_steps_give_while_the_batch_shrinks(name):
    config = dataclasses.replace(SparseSpecConfig(stride=4, min_tokens=32), **CONFIGS[name])
    graphed, eager = Toy(config, graphs=True), Toy(config, graphs=False)
    rng = random.Random(3)
    pools = list(range(1, SLOTS + 1))
    while pools:
        for _ in range(3):
            rng.shuffle(pools)
            assert graphed.run(pools) == eager.run(pools)
        assert torch.equal(graphed.state.selected_len, eager.state.selected_len)
        pools.pop()
    assert graphed.rounds.eager_micro_steps == 0
    assert eager.rounds.eager_micro_steps > 0


def test_a_sampled_round_does_not_wait_for_the_device_either():
    toy = Toy(SparseSpecConfig(stride=4, min_tokens=32), graphs=True)
    for _ in range(3):
        rows = toy.run([2, 5, 6], greedy=False)
        assert all(1 <= len(row) <= 5 for row in rows)
    assert toy.rounds.eager_micro_steps == 0
