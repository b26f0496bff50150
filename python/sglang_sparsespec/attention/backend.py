"""The attention backend that the target model sees: SGLang's own, with our micro-steps beside it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_sparsespec.attention.interface import LayerKV, MicroStepAttention, VerifyRows
from sglang_sparsespec.attention.layers import AttentionLayers, WindowRows
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.metrics import PhaseTimer
from sglang_sparsespec.rounds.batch import MicroStepBatch, to_device
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.selection import Selector
from sglang_sparsespec.spec_input import SparseVerifyInput

if TYPE_CHECKING:
    from sglang_sparsespec.attention.device_seed import DeviceSeed
    from sglang_sparsespec.rounds.device import DeviceRounds, DeviceStep

# Last queries of a prefill whose attention seeds a request's first selection.
SEED_QUERIES = 16


class SparseSpecAttentionBackend(AttentionBackend):
    """Routes micro-steps to `attention` and everything else to the backend that SGLang resolved.

    Prefills run on `inner`; their last queries are scored afterwards, so that a first round is sparse
    already.
    """

    def __init__(
        self,
        inner: AttentionBackend,
        attention: MicroStepAttention | None,
        selector: Selector,
        state: RequestState,
        config: SparseSpecConfig,
        req_to_token: torch.Tensor,
        kv_pool: Any,
        timer: PhaseTimer,
        layers: AttentionLayers,
        rounds: DeviceRounds | None = None,
    ) -> None:
        super().__init__()
        # A host that plans gathers needs exact lengths; SGLang fetches them between rounds.
        self.needs_cpu_seq_lens = rounds is None or bool(inner.needs_cpu_seq_lens)
        self.rounds = rounds
        self.inner = inner
        self.attention = attention
        self.selector = selector
        self.state = state
        self.config = config
        self.req_to_token = req_to_token
        self.kv_pool = kv_pool
        self.timer = timer
        self.layers = layers
        self.attn_backend_list = [inner]
        self.seeded_rows: list[int] = []  # rows of the last prefill whose selection it seeded
        self._step: MicroStepBatch | None = None
        self._device_step: DeviceStep | None = None
        self._device_seed: DeviceSeed | None = None
        self._windows: dict[int, WindowRows] = {}  # of a host-planned micro-step, by size
        self._seed: VerifyRows | None = None
        self._seed_gather: torch.Tensor | None = None

    # -- once a forward -------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._step = self._seed = self._device_step = self._device_seed = None
        if isinstance(forward_batch.spec_info, SparseVerifyInput):
            if forward_batch.spec_info.micro_step is None:
                raise RuntimeError("a micro-step that lives on the device needs no metadata from the host.")
            self._plan_micro_step(forward_batch.spec_info.micro_step)
            return
        self.inner.init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_extend_without_speculative():
            if self.rounds is not None:
                self._device_seed = self._plan_device_seed(self.rounds, forward_batch)
            else:
                self._plan_seed(forward_batch)

    def _plan_device_seed(self, rounds: DeviceRounds, forward_batch: Any) -> DeviceSeed | None:
        from sglang_sparsespec.attention.device_seed import plan_device_seed

        return plan_device_seed(rounds, forward_batch, SEED_QUERIES)

    def bind(self, step: DeviceStep | None) -> None:
        """Run the following forward as this micro-step of the CUDA-graph path."""
        self._device_step = step

    def finish_prefill(self) -> None:
        """Make the selections that the prefill just run has scored."""
        if self._device_seed is not None and self.rounds is not None:
            self.rounds.select(self._device_seed.rows, self.rounds.scores)
            self._device_seed = None

    def _plan_micro_step(self, step: MicroStepBatch) -> None:
        if self.attention is None:
            raise RuntimeError("there is no host-planned attention to plan this micro-step.")
        self._step = step
        self.attention.plan(step.drafts, step.verifies)
        self._windows = {
            size: WindowRows.of(self.req_to_token, step.token_pools, step.positions, size, dtype=torch.int64)
            for size in self.layers.sizes
        }
        if step.verifies is not None:
            self._begin_selection(step.verifies, step.verifies.first)

    def _plan_seed(self, forward_batch: Any) -> None:
        lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        totals = [int(n) for n in forward_batch.seq_lens_cpu]
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        # An empty prompt has no query that could seed a selection.
        self.seeded_rows = [row for row, n in enumerate(lengths) if n > 0]
        if not self.seeded_rows:
            return
        on_device = partial(to_device, device=self.req_to_token.device)
        tails = [min(lengths[row], SEED_QUERIES) for row in self.seeded_rows]
        padded = max(tails)
        gather = [
            [ends[row] - tail + min(t, tail - 1) for t in range(padded)]
            for row, tail in zip(self.seeded_rows, tails, strict=True)
        ]
        first = [totals[row] - tail for row, tail in zip(self.seeded_rows, tails, strict=True)]
        self._seed = VerifyRows(
            pools=forward_batch.req_pool_indices.long()[on_device(self.seeded_rows)],
            first=on_device(first),
            queries=on_device(tails),
            first_cpu=tuple(first),
            padded_queries=padded,
        )
        self._seed_gather = on_device([t for row in gather for t in row]).view(-1, padded)
        self._begin_selection(self._seed, self._seed.first + self._seed.queries)

    def _begin_selection(self, rows: VerifyRows, prefix: torch.Tensor) -> None:
        """Record what all layers share, and select at once where no scores are needed."""
        capacity = self.state.selected.shape[-1]
        self._prefix = prefix
        if self._step is not None and not self._step.scored:
            return
        self.state.selected_base[rows.pools] = prefix
        self.state.selected_len[rows.pools] = self.selector.budgets(prefix).clamp(max=capacity)
        if not self.selector.needs_scores:
            positions, _ = self.selector.select(None, prefix, width=rows.width, capacity=capacity)
            kept = positions.shape[-1]
            self.state.selected[:, :, rows.pools, :kept] = positions.permute(1, 0, 2)

    # -- every layer -------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._device_step is not None and self.rounds is not None:
            self._store(k, v, layer, forward_batch, save_kv_cache)
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            view = self._layer(layer, kwargs.get("sinks"))
            return self.rounds.attend(self._device_step, view, heads).reshape(len(q), -1)
        if self._step is not None:
            self._store(k, v, layer, forward_batch, save_kv_cache)
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            return self._forward_micro_step(self._step, heads, self._layer(layer, kwargs.get("sinks")))
        out = self.inner.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if self._device_seed is not None and self.rounds is not None:
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            self._device_seed.score(self.rounds, self._layer(layer, kwargs.get("sinks")), heads)
        elif self._seed is not None and self.selector.needs_scores:
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            self._seed_layer(self._seed, heads, self._layer(layer, kwargs.get("sinks")))
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.inner.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _layer(self, layer: Any, sinks: torch.Tensor | None) -> LayerKV:
        return LayerKV(
            index=self.layers.index(layer.layer_id),
            window=self.layers.windows.get(layer.layer_id),
            sinks=sinks,
            k=self.kv_pool.get_key_buffer(layer.layer_id),
            v=self.kv_pool.get_value_buffer(layer.layer_id),
            scale=layer.scaling,
            heads=layer.tp_q_head_num,
            k_scale=_factor(layer, "k"),
            v_scale=_factor(layer, "v"),
        )

    def _forward_micro_step(self, step: MicroStepBatch, q: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        """One layer of a host-planned micro-step: q [T, heads, D], its KV already stored."""
        if self.attention is None:
            raise RuntimeError("there is no host-planned attention to run this micro-step.")
        if layer.window is not None:
            rows = self._windows[layer.window]
            return self.attention.attend_window(layer, q, rows.slots, rows.lengths).reshape(len(q), -1)
        drafted = step.draft_count
        parts = []
        if step.drafts is not None:
            parts.append(self.attention.draft(layer, q[:drafted], self.draft_slots(layer.index, step)))
        if step.verifies is not None:
            wants = (
                self.selector.needs_scores
                and step.scored
                and layer.starts_group(self.config.score_layer_stride)
            )
            out, scores = self.attention.verify(layer, q[drafted:][step.verify_gather], scores=wants)
            parts.append(out.flatten(0, 1)[step.verify_flat])
            if scores is not None:
                self._select_layer(layer.index, step.verifies, scores)
        return torch.cat(parts).reshape(len(q), -1)

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> None:
        if save_kv_cache and k is not None:
            # The scales matter to an fp8 pool only; they are None for most models.
            where = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def draft_slots(self, index: int, step: MicroStepBatch) -> torch.Tensor:
        """KV slots that the draft rows attend to in one layer: selection, then all tokens since it was made.

        Returns [n, H, width] int64; beyond a row's length they repeat its own slot.
        """
        rows = step.drafts
        if rows is None:
            raise RuntimeError("the micro-step has no draft rows.")
        column = torch.arange(rows.width, device=rows.pools.device)
        chosen = self.state.selected_len[rows.pools][:, None]
        since = self.state.selected_base[rows.pools][:, None] + column - chosen
        since = torch.minimum(since, step.row_prefix[: len(rows), None])
        group = index // self.config.score_layer_stride
        selected = self.state.selected[group][:, rows.pools]  # [H, n, capacity]
        selected = selected.gather(
            2, column.clamp(max=selected.shape[2] - 1).expand(*selected.shape[:2], rows.width)
        )
        positions = torch.where(column < chosen, selected, since).permute(1, 0, 2)
        return self.req_to_token[rows.pools[:, None, None], positions].long()

    def _seed_layer(self, rows: VerifyRows, q: torch.Tensor, layer: LayerKV) -> None:
        if self.attention is None or not layer.starts_group(self.config.score_layer_stride):
            return
        scores = self.attention.tail_scores(layer, q[self._seed_gather], rows)
        self._select_layer(layer.index, rows, scores)

    def _select_layer(self, index: int, rows: VerifyRows, scores: torch.Tensor) -> None:
        with self.timer.phase("select"):
            if self.config.index_scope == "layer":
                scores = scores.mean(dim=1, keepdim=True)
            positions, _ = self.selector.select(
                scores, self._prefix, width=scores.shape[-1], capacity=self.state.selected.shape[-1]
            )
            kept = positions.shape[-1]
            group = index // self.config.score_layer_stride
            self.state.selected[group][:, rows.pools, :kept] = positions.permute(1, 0, 2)

    def support_triton(self) -> bool:
        return self.inner.support_triton()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def _factor(layer: Any, which: str) -> float:
    """What stored fp8 keys ("k") or values ("v") of a layer are multiplied with."""
    factor = getattr(layer, f"{which}_scale_float", None)
    return 1.0 if factor is None else float(factor)


def _inner_attribute(name: str, settable: bool) -> property:
    """A class attribute of the base class that `inner` answers for; a value set on the wrapper itself
    wins."""

    def read(self: SparseSpecAttentionBackend) -> Any:
        own = self.__dict__.get("_own", {})
        return own[name] if name in own else getattr(self.inner, name)

    def write(self: SparseSpecAttentionBackend, value: Any) -> None:
        self.__dict__.setdefault("_own", {})[name] = value

    return property(read, write if settable else None)


def _forward_to_inner() -> None:
    """Let `inner` answer for all that the base class would otherwise answer with a default."""
    own = set(vars(SparseSpecAttentionBackend)) | {"forward"}
    for name, value in vars(AttentionBackend).items():
        if not name.startswith("_") and name not in own:
            settable = not callable(value) and not isinstance(value, property)
            setattr(SparseSpecAttentionBackend, name, _inner_attribute(name, settable))


_forward_to_inner()
