"""A toy model behind the CUDA-graph path: attention layers over embedded tokens and an output matrix.

That is enough for every kernel of a round. On a CPU the kernels are their references; nothing is captured.
"""

import gc
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.layers import AttentionLayers
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.metrics import PhaseTimer
from sglang_sparsespec.rounds.device import DeviceRounds
from sglang_sparsespec.rounds.graphs import plan_keys
from sglang_sparsespec.rounds.kernels import load_kernels
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlanner
from sglang_sparsespec.rounds.replayed import ReplayedRounds
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.sampling.seeds import Seeds

SLOTS, CONTEXT, LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 6, 600, 3, 8, 2, 64, 40


def committed_at_first(pool: int) -> int:
    return 300 + 7 * pool


class Toy:
    """Requests 1..SLOTS, each with random KV of `committed_at_first` tokens; request p's last token is p.

    windows: sliding windows by layer. sinks: whether heads have learned sinks.
    """

    def __init__(
        self,
        config: SparseSpecConfig,
        attention,
        *,
        graphs=False,
        device="cpu",
        capacity=SLOTS * CONTEXT,
        kv_heads=KV_HEADS,
        windows=None,
        sinks=False,
    ):
        torch.manual_seed(0)
        windows = windows or {}
        full = tuple(layer for layer in range(LAYERS) if layer not in windows)
        self.layers = AttentionLayers(full, windows)
        self.config, self.device, self.kv_heads = config, device, kv_heads
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        rows = SLOTS + 1
        self.table = (torch.randperm(rows * CONTEXT).int() + 1).view(rows, CONTEXT).to(device)
        self.state = RequestState(
            rows=rows,
            stride=config.stride,
            support=config.draft_support,
            layers=config.selection_groups(len(full)),
            heads=1 if config.index_scope == "layer" else self.kv_heads,
            max_selected=config.budget(CONTEXT),
            device=device,
        )
        device_rounds = DeviceRounds(
            config=config,
            state=self.state,
            kernels=load_kernels(device),
            attention=attention,
            req_to_token=self.table,
            slots=SLOTS,
            layers=len(full),
            windows=self.layers.sizes,
            heads=HEADS,
            score_capacity=capacity,
        )
        self.k, self.v = (self._random(LAYERS, rows * CONTEXT + 1, self.kv_heads, DIM) for _ in "kv")
        self.embed = self._random(VOCABULARY, HEADS * DIM)
        self.to_kv = self._random(HEADS * DIM, 2 * self.kv_heads * DIM) / 16
        self.sinks = 3 + self._random(LAYERS, HEADS) if sinks else [None] * LAYERS
        keys, _ = plan_keys(
            [1, 2, 4, SLOTS] if graphs else [],
            stride=config.stride,
            schedule=config.schedule,
            score_every=config.score_every,
            adapt=config.may_adapt,
        )
        generator = torch.Generator(device).manual_seed(1)
        self.rounds = ReplayedRounds(
            config, device_rounds, self.forward, generator, PhaseTimer(device), keys=keys
        )
        self.planner = RoundPlanner(config.stride, config.schedule)
        if graphs:
            capture(self.rounds.graphs)
        self.committed = {pool: committed_at_first(pool) for pool in range(1, rows)}
        for pool, length in self.committed.items():
            self.state.begin_window(
                torch.tensor([pool], device=device), torch.tensor([length], device=device)
            )
            self.state.tokens[pool, 0] = pool

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.dtype).to(self.device)

    def _layer(self, index: int, x: torch.Tensor, loc: torch.Tensor) -> LayerKV:
        k, v = (x @ self.to_kv).view(-1, 2, self.kv_heads, DIM).unbind(1)
        self.k[index][loc], self.v[index][loc] = k, v
        return LayerKV(
            index=self.layers.index(index),
            k=self.k[index],
            v=self.v[index],
            scale=DIM**-0.5,
            heads=HEADS,
            window=self.layers.windows.get(index),
            sinks=self.sinks[index],
        )

    def _embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embed[ids] + torch.sin(positions[:, None] * 0.1).to(self.dtype)

    def forward(self, step) -> torch.Tensor:
        b = step.buffers
        x = self._embed(b.input_ids, b.positions)
        for index in range(LAYERS):
            layer = self._layer(index, x, b.out_cache_loc)
            x = x + self.rounds.rounds.attend(step, layer, x.view(-1, HEADS, DIM)).reshape(len(x), -1)
        return x.float() @ self.embed.float().T

    def plain(self, pool: int, count: int, seed: int | None = None) -> list[int]:
        """The next `count` tokens of a request, greedy or by a seed: full attention, step by step; overwrites
        KV."""
        tokens, at = [pool], committed_at_first(pool)
        for _ in range(count):
            x = self._embed(torch.tensor(tokens[-1:]), torch.tensor([at]))
            slots = self.table[pool, : at + 1].long()
            for index in range(LAYERS):
                layer = self._layer(index, x, slots[-1:])
                seen = slots if layer.window is None else slots[-layer.window - 1 :]
                k, v = (t[seen].repeat_interleave(HEADS // self.kv_heads, dim=1) for t in (layer.k, layer.v))
                logits = torch.einsum("hd,lhd->hl", x.view(HEADS, DIM), k) * layer.scale
                likely = torch.exp(logits.double())
                total = likely.sum(dim=-1) + (0 if layer.sinks is None else torch.exp(layer.sinks.double()))
                weights = (likely / total[:, None]).to(v.dtype)
                x = x + torch.einsum("hl,lhd->hd", weights, v).reshape(1, -1)
            logits = x @ self.embed.T
            if seed is not None:
                seeds = Seeds(torch.tensor([seed]), torch.tensor([True]))
                tokens.append(int(seeds.pick(logits.softmax(dim=-1), torch.tensor([at]))))
            else:
                tokens.append(int(logits.argmax()))
            at += 1
        return tokens[1:]

    def run(
        self,
        pools: list[int],
        *,
        greedy: bool = True,
        seeds: Sequence[int | None] | None = None,
        drafts: int | None = None,
        unified: bool | None = None,
        logprobs: bool = False,
        total: int | None = None,
    ) -> list[list[int]]:
        """One round, of k drafts by default. On a GPU any wait for the device within it raises.

        seeds: of each request, which then samples.
        total: fill verifications up to so many drafts.
        logprobs: also keep the verifications' logits in `self.logits`.
        """
        count, greedy = len(pools), greedy and seeds is None
        info = SimpleNamespace(
            temperatures=torch.full((count, 1), 1.0, device=self.device),
            top_ks=torch.full((count,), 1 if greedy else 1 << 30, device=self.device),
            top_ps=torch.ones(count, device=self.device),
            min_ps=torch.zeros(count, device=self.device),
            is_all_greedy=greedy,
            need_top_k_sampling=False,
            need_top_p_sampling=False,
            need_min_p_sampling=False,
            is_any_greedy=greedy,
        )
        batch = SimpleNamespace(
            seq_lens=torch.tensor([self.committed[p] for p in pools], device=self.device),
            req_pool_indices=torch.tensor(pools, device=self.device),
            sampling_info=info,
            return_logprob=logprobs,
            reqs=[
                SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed))
                for seed in seeds or [None] * count
            ],
        )
        keys = [RequestKey(pool, 0) for pool in pools]
        plan = self.planner.plan_round(keys, drafts, unified=unified)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            outcome = self.rounds.run(batch, keys, plan, total=total)
        finally:
            if self.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        lengths, self.logits = outcome.lengths.tolist(), outcome.logits
        for pool, length in zip(pools, lengths, strict=True):
            self.committed[pool] += length
        assert outcome.committed.tolist() == [self.committed[p] for p in pools]
        return [row[:n] for row, n in zip(outcome.tokens.tolist(), lengths, strict=True)]


def capture(graphs) -> None:
    """As `MicroStepGraphs.capture` does within SGLang, without it."""
    gc.collect()  # a graph of an earlier test that dies during a capture would break it
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for key in graphs._keys:
        step = graphs._step(key)
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
