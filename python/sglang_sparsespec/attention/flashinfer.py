"""Micro-step attention on FlashInfer's paged decode wrapper, page size 1.

One plan a micro-step serves all layers: a plan holds tiles, not indices, so each layer only swaps the
index buffer.
Plans need exact lengths on the host. It knows them but for drafts that follow a verification of the same
round
(unified schedule); there, and only there, it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparsespec.attention.interface import DraftRows, LayerKV, MicroStepAttention, VerifyRows
from sglang_sparsespec.attention.torch_reference import TorchAttention

WORKSPACE_BYTES = 256 << 20


class FlashInferAttention(MicroStepAttention):
    """The interface on `BatchDecodeWithPagedKVCacheWrapper`: CUDA cores for drafts, tensor cores for
    verification.

    Args:
        req_to_token: [rows, positions] int32 page table.
        heads, kv_heads, head_dim: of this rank's layers.
        dtype: of queries and KV.
    """

    name = "flashinfer"

    def __init__(
        self, req_to_token: torch.Tensor, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._req_to_token = req_to_token
        self._heads, self._kv_heads, self._head_dim, self._dtype = heads, kv_heads, head_dim, dtype
        self._scorer = TorchAttention(req_to_token)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=req_to_token.device)
        self._draft_wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=False)
        # The kernels of one micro-step run in stream order, but each wrapper's plan lives in its own
        # workspace.
        self._verify_wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros_like(workspace), "NHD", use_tensor_cores=True
        )
        self._drafts: DraftRows | None = None
        self._draft_heads = 0
        self._draft_pack: torch.Tensor | None = None
        self._verifies: VerifyRows | None = None
        self._verify_planned = False

    def plan(self, drafts: DraftRows | None, verifies: VerifyRows | None) -> None:
        self._drafts, self._verifies = drafts, verifies
        self._draft_heads = 0  # planned by the first layer, which knows how many index heads there are
        self._verify_planned = False

    def draft(self, layer: LayerKV, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows, index_heads = self._drafts, slots.shape[1]
        if rows is None:
            raise RuntimeError("attention was asked for rows that the micro-step did not plan.")
        if self._draft_heads != index_heads:
            self._plan_drafts(rows, index_heads, layer.scale)
        if index_heads == 1:
            pages, keys, values, queries = slots, layer.k[:, None], layer.v[:, None], q
        else:
            # A KV head a row: the pool seen as [slots * Hkv] pages of one head each.
            head = torch.arange(index_heads, device=q.device)[:, None]
            pages = slots * index_heads + head
            keys = layer.k.reshape(-1, 1, 1, self._head_dim)
            values = layer.v.reshape(-1, 1, 1, self._head_dim)
            queries = q.view(-1, self._heads // index_heads, self._head_dim)
        self._draft_wrapper._paged_kv_indices_buf = pages.to(torch.int32).flatten()[self._draft_pack]
        return self._draft_wrapper.run(queries.contiguous(), (keys, values)).view(q.shape)

    def verify(
        self, layer: LayerKV, q: torch.Tensor, *, scores: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._verifies
        if rows is None:
            raise RuntimeError("attention was asked for rows that the micro-step did not plan.")
        if not self._verify_planned:
            self._plan_verifies(rows, layer.scale)
        cache = (layer.k[:, None], layer.v[:, None])
        out = self._verify_wrapper.run(q.flatten(0, 1).contiguous(), cache).view(q.shape)
        return out, self._scorer.tail_scores(layer, q, rows) if scores else None

    def tail_scores(self, layer: LayerKV, q: torch.Tensor, rows: VerifyRows) -> torch.Tensor:
        return self._scorer.tail_scores(layer, q, rows)

    def _plan_drafts(self, rows: DraftRows, index_heads: int, scale: float) -> None:
        lengths = rows.bounds if rows.exact else rows.lengths.tolist()
        lengths = [length for length in lengths for _ in range(index_heads)]
        self._draft_pack = self._plan(
            self._draft_wrapper,
            lengths,
            stride=rows.width,
            heads=self._heads // index_heads if index_heads > 1 else self._heads,
            kv_heads=self._kv_heads if index_heads == 1 else 1,
            scale=scale,
        )
        self._draft_heads = index_heads

    def _plan_verifies(self, rows: VerifyRows, scale: float) -> None:
        lengths = [first + rows.padded_queries for first in rows.first_cpu]
        pack = self._plan(
            self._verify_wrapper,
            lengths,
            stride=rows.width,
            heads=self._heads,
            kv_heads=self._kv_heads,
            scale=scale,
            q_len_per_req=rows.padded_queries,
        )
        slots = self._req_to_token[rows.pools, : rows.width]
        self._verify_wrapper._paged_kv_indices_buf = slots.flatten()[pack]
        self._verify_planned = True

    def _plan(
        self,
        wrapper: Any,
        lengths: Sequence[int],
        *,
        stride: int,
        heads: int,
        kv_heads: int,
        scale: float,
        **more: Any,
    ) -> torch.Tensor:
        """Plan rows of these lengths. Returns [sum of lengths] int64: where each row's slots stand among
        rows of
        `stride` columns, so that a layer packs its slots by one gather."""
        device = self._req_to_token.device
        counts = torch.tensor(lengths, dtype=torch.int64)
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        starts = torch.arange(len(lengths)) * stride - indptr[:-1]
        pack = torch.arange(int(indptr[-1])) + starts.repeat_interleave(counts)
        wrapper.plan(
            indptr,
            torch.zeros(len(pack), dtype=torch.int32, device=device),
            torch.ones(len(lengths), dtype=torch.int32),
            heads,
            kv_heads,
            self._head_dim,
            1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=scale,
            **more,
        )
        return pack.to(device, non_blocking=True)
