"""A micro-step whose lengths live on the device: static buffers, and what is done with them around the model.

The host uploads one table a round: which request drafts or verifies in which slot of which micro-step.
Everything else (lengths, token ids, KV slots, acceptance, selections) is computed on the device from the
requests' state, so that one captured graph serves every batch that fits its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sgl_kernel_ext.buffers import FIELDS, HEADER, MicroStepBuffers, RequestTensors, RoundBuffers

from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.layers import WindowRows, add_sinks
from sglang_sparsespec.attention.paged import PagedAttention, ScoredRows, ScoreTarget
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.kernels import RoundKernels
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlan
from sglang_sparsespec.rounds.state import RequestState

LOOK_UP_LEAST = 3  # tokens that must match


@dataclass(frozen=True)
class DeviceStep:
    """The micro-step that the attention backend is asked to run now."""

    buffers: MicroStepBuffers
    starts: torch.Tensor  # [nv+1] int32
    scored: ScoredRows | None  # its verify rows, where they make new selections


class DeviceRounds:
    """Static buffers of all micro-steps, and the device work of a micro-step outside the model.

    Args:
        slots: most requests of a batch.
        layers, heads: attention layers that see all tokens, and query heads of each, of this rank's model.
        windows: sizes of the other layers' sliding windows.
        score_capacity: keys that can be scored at once over all rows, about the tokens of the KV pool.
    """

    def __init__(
        self,
        *,
        config: SparseSpecConfig,
        state: RequestState,
        kernels: RoundKernels,
        attention: PagedAttention,
        req_to_token: torch.Tensor,
        slots: int,
        layers: int,
        heads: int,
        score_capacity: int,
        windows: Sequence[int] = (),
    ) -> None:
        device = req_to_token.device
        self.config, self.state, self.kernels, self.attention = config, state, kernels, attention
        self.slots = slots
        self.queries = config.stride + 1
        groups, index_heads, rows, cap = state.selected.shape
        self.page_width = cap + config.most_since_selection
        self.capacity = score_capacity

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffers = RoundBuffers(slots, self.queries, device)
        self.flat_table, self.header = self.buffers.flat_table, self.buffers.header
        self.table = self.buffers.table
        self.draft_pages = ints(groups, slots, index_heads, self.page_width)
        self.verify_pages = ints(slots, req_to_token.shape[1])
        # One KV head on this rank is one line of scores, whatever the scope.
        self.scope = "layer" if index_heads == 1 else "kv_head"
        lines = (groups, score_capacity) if index_heads == 1 else (groups, index_heads, score_capacity)
        self.scores = ints(*lines, dtype=torch.int16)
        self.fused = attention.fuses_scores and self.scores_needed
        if self.fused:
            self.sums = ints(*lines)  # all zero between verifications: selecting clears what it read
            self.lse = torch.full((layers, rows, self.queries, heads), float("-inf"), device=device)
        # Sums of up to Q probabilities of all heads must fit 31 bits.
        self.shift = min(22, 30 - (self.queries * heads).bit_length())
        self._draft_lse: list[torch.Tensor] = []  # of the micro-step being run, a tensor a layer
        self._sizes = tuple(windows)
        self._windows: dict[int, WindowRows] = {}  # of the micro-step being run, by size
        self._reference_lse: torch.Tensor | None = None
        self.out_tokens = ints(slots, self.queries, dtype=torch.int64)
        self.out_lens = ints(slots, dtype=torch.int64)
        self.requests = RequestTensors(
            committed=state.committed,
            tokens=state.tokens,
            selected=state.selected,
            selected_len=state.selected_len,
            selected_base=state.selected_base,
            req_to_token=req_to_token,
        )
        # Tokens of every request by position, up to the last committed one.
        self.history = ints(*req_to_token.shape) if config.lookup == "on" else None
        self._starts: dict[int, torch.Tensor] = {}  # by tokens of a verify slot
        self.reset()

    def reset(self) -> None:
        """Forget all requests: the KV cache was flushed."""
        self.state.zero()
        if self.fused:
            self.sums.zero_()
        if self.config.selector == "window":
            sink = min(self.config.sink, self.state.selected.shape[-1])
            self.state.selected[..., :sink] = torch.arange(sink, dtype=torch.int32, device=self.header.device)

    @property
    def nbytes(self) -> int:
        # Merged by name: what stands in both is one tensor. Views are counted with their base.
        tensors = {**vars(self.buffers), **vars(self)}.values()
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t._base is None)

    # -- the host's part of a round -------------------------------------

    def upload(self, plan: RoundPlan, keys: list[RequestKey], *, greedy: bool) -> None:
        """Send the round's table, without waiting for the device."""
        flat = np.zeros(self.flat_table.numel(), dtype=np.int32)
        flat[1] = greedy
        table = flat[HEADER:].reshape(self.queries, 2, self.slots, FIELDS)
        pools = np.array([key.pool for key in keys], dtype=np.int32)
        for at, step in enumerate(plan.micro_steps):
            for kind, rows in enumerate(step.tables):
                if len(rows):
                    table[at, kind, : len(rows), 0] = pools[rows[:, 1]]
                    table[at, kind, : len(rows), 1:] = rows
        host = torch.from_numpy(flat)
        if self.flat_table.is_cuda:
            # The pinned block goes back to torch's host allocator, which waits for this copy.
            host = host.pin_memory()
        self.flat_table.copy_(host, non_blocking=True)

    # -- lookups, between the graphs of a round -------------------------------------

    def remember(
        self, pools: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Requests `pools` [n] put out the first `lengths` [n] of `tokens` [n, Q], from `at` [n] on."""
        if self.history is None:
            raise RuntimeError("nothing is remembered: lookup is off.")
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        places = (at[:, None] + columns).clamp(max=self.history.shape[1] - 1)
        rows = pools[:, None].expand_as(places)
        real = columns < lengths[:, None]
        self.history[rows, places] = torch.where(real, tokens.int(), self.history[rows, places])

    def look_up(self, pools: torch.Tensor, drafted: int, most: int, *, sampled: bool) -> None:
        """Fill the coming micro-step's verifications of `pools` [n], of `drafted` drafts each, up to `most`.

        Args:
            sampled: acceptance is drawn, and needs to know what tokens were drawn from.
        """
        if self.history is None:
            raise RuntimeError("nothing is remembered: lookup is off.")
        step = self.buffers.step(0, len(pools), most + 1)
        self.kernels.look_up(step, self.requests, self.history, most=most, least=LOOK_UP_LEAST)
        state = self.state
        if sampled:  # from one token that was certain
            state.support_ids[pools, drafted:most, 0] = state.tokens[pools, drafted + 1 : most + 1]
            # Not by assignment: a number assigned to indexed rows is copied to the device, and waited for.
            state.support_probs[:, drafted:most].index_fill_(0, pools, 0.0)
            state.support_probs[:, drafted:most, 0].index_fill_(0, pools, 1.0)
        if self.fused:
            # No draft has seen these positions: their queries are not scored.
            self.lse[:, :, drafted:most].index_fill_(1, pools, float("-inf"))

    # -- the device's part of a micro-step -------------------------------------

    def step(self, nd: int, nv: int, *, scored: bool, queries: int | None = None) -> DeviceStep:
        """Views of the static buffers for `nd` draft slots and `nv` verify slots of `queries` tokens each."""
        buffers = self.buffers.step(nd, nv, queries)
        b = buffers
        rows = None
        if scored and nv:
            rows = ScoredRows(b.verify_pool, b.first, b.verify_queries, b.first, b.offset, b.queries)
        width = buffers.queries
        if width not in self._starts:
            starts = torch.arange(self.slots + 1, dtype=torch.int32, device=self.header.device)
            self._starts[width] = starts * width
        return DeviceStep(buffers, self._starts[width][: nv + 1], rows)

    def begin(self, step: DeviceStep) -> None:
        """Before the model: inputs and page tables."""
        buffers = step.buffers
        self.kernels.prepare(buffers, self.requests, page_width=self.page_width, capacity=self.capacity)
        self.kernels.draft_pages(buffers, self.requests, self.draft_pages)
        self.kernels.verify_pages(buffers, self.requests, self.verify_pages)
        if buffers.nd:
            self.attention.begin_drafts(buffers.draft_len)
        self._draft_lse.clear()
        self._windows = {size: self._window_rows(buffers, size) for size in self._sizes}
        if self.fused and step.scored is not None:
            self._reference_lse = self._estimate_lse(step.scored)

    def _window_rows(self, buffers: MicroStepBuffers, size: int) -> WindowRows:
        pools = torch.cat([buffers.draft_pool, buffers.verify_pool.repeat_interleave(buffers.queries)])
        table = self.requests.req_to_token
        return WindowRows.of(table, pools, buffers.positions, size, dtype=torch.int32)

    def _estimate_lse(self, rows: ScoredRows) -> torch.Tensor:
        """LSE that the drafts saw at the positions being verified, [layers, R, queries, heads].

        A selection holds most of the mass, so it is close to the true one. The last query has no draft: it is
        left out, and a row without drafts keeps its selection.
        """
        rows.offset.masked_fill_(rows.real < 2, -1)
        drafted = torch.arange(rows.queries, device=self.lse.device) < (rows.real - 1)[:, None]
        return self.lse[:, rows.pools.long(), : rows.queries].masked_fill_(
            ~drafted[None, :, :, None], float("-inf")
        )

    def attend(self, step: DeviceStep, layer: LayerKV, q: torch.Tensor) -> torch.Tensor:
        """One layer of the micro-step: q [T, heads, D], its KV already stored. Returns [T, heads, D]."""
        buffers = step.buffers
        nd, nv = buffers.nd, buffers.nv
        if layer.window is not None:
            rows = self._windows[layer.window]
            return add_sinks(*self.attention.attend_window(layer, q, rows.slots, rows.lengths), layer.sinks)[
                0
            ]
        parts = []
        if nd:
            pages = self.draft_pages[layer.index // self.config.score_layer_stride][:nd]
            out, lse = add_sinks(*self.attention.draft(layer, q[:nd], pages, buffers.draft_len), layer.sinks)
            parts.append(out)
            if self.fused:
                self._draft_lse.append(lse)
        if nv:
            parts.append(self._verify(step, layer, q[nd:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _verify(self, step: DeviceStep, layer: LayerKV, q: torch.Tensor) -> torch.Tensor:
        buffers, rows = step.buffers, step.scored
        pages = self.verify_pages[: buffers.nv]
        if not self.scores_needed or not layer.starts_group(self.config.score_layer_stride):
            rows = None
        if rows is not None and self.fused and self._reference_lse is not None:
            sums = self.sums[layer.index // self.config.score_layer_stride]
            target = ScoreTarget(sums, self._reference_lse[layer.index], self.shift, self.scope)
            out, lse = self.attention.verify_scored(layer, q, pages, rows, target)
            return add_sinks(out, lse.t(), layer.sinks)[0]
        out, lse = self.attention.verify(layer, q, pages, buffers.seqlens, step.starts, buffers.queries)
        if layer.sinks is not None:
            out, by_token = add_sinks(out, lse.t(), layer.sinks)
            lse = by_token.t().contiguous()
        if rows is not None:
            self.score(layer, q, lse, pages, rows)
        return out

    def finish(self, step: DeviceStep, logits: torch.Tensor) -> None:
        """After the model: selections, then drafts and acceptance of greedy batches. logits: [T, V]."""
        if step.scored is not None:
            self.select(step.scored, self.sums if self.fused else self.scores, clear=self.fused)
        drafted = step.buffers.nd
        if self._draft_lse:
            at = (step.buffers.draft_pool.long(), step.buffers.draft_at.long())
            self.lse[:, at[0], at[1]] = torch.stack(self._draft_lse)
        picked = logits.argmax(dim=-1)
        if self.config.debug_drafts == "wrong" and drafted:
            picked[:drafted] = logits[:drafted].argmin(dim=-1)
        self.kernels.finish_greedy(step.buffers, self.requests, picked, self.out_tokens, self.out_lens)
        self.header[0] += 1

    # -- selection, for verifications and prefills alike -------------------------------------

    @property
    def scores_needed(self) -> bool:
        return self.config.selector == "pillar"

    def score(
        self, layer: LayerKV, q: torch.Tensor, lse: torch.Tensor, pages: torch.Tensor, rows: ScoredRows
    ) -> None:
        """Score the keys of one layer that starts a group of layers. q: [R * queries, heads, D]."""
        self.kernels.score_keys(
            q,
            layer.k,
            lse,
            pages,
            rows.first,
            rows.real,
            rows.prefix,
            rows.offset,
            self.scores[layer.index // self.config.score_layer_stride],
            padded_queries=rows.queries,
            scale=layer.scale,
            scope=self.scope,
            k_scale=layer.k_scale,
        )

    def select(self, rows: ScoredRows, scores: torch.Tensor, *, clear: bool = False) -> None:
        """Make the selections of rows just scored, for all layers, and let drafts use them from now on.

        Args:
            scores: as `self.scores` (sortable) or `self.sums` (fixed point, to be zeroed with `clear`).
        """
        config = self.config
        window = config.selector == "window"
        if config.selector == "random":
            scores.random_(0, 0x7F80)
        if not window:
            self.kernels.select(
                scores,
                rows.offset,
                rows.prefix,
                rows.pools,
                self.state.selected,
                ratio_ppm=config.ratio_ppm,
                min_tokens=config.min_tokens,
                sink=config.sink,
                recent=config.recent,
                clear=clear,
            )
        self.kernels.settle(
            rows.pools,
            rows.prefix,
            rows.offset,
            self.requests,
            ratio_ppm=config.ratio_ppm,
            min_tokens=config.min_tokens,
            kept=config.kept,
            window_sink=config.sink if window else -1,
        )
