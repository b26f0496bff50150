"""Micro-step attention on FlashInfer's paged decode wrapper, page size 1.

One plan a micro-step serves all layers: a plan holds tiles, not indices, so each layer only swaps the index buffer.
Rows stand at a fixed stride, and their true lengths live on the device: FlashInfer computes a row's length as
`(indptr[b+1] - indptr[b] - 1) * page_size + last_page_len[b]`, so `last_page_len = length - (stride - 1)` (negative)
describes a short row in a long slot. Where the host knows a bound only, rows are not split: a split that a short
row leaves empty would be read out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparsespec.attention.interface import DraftRows, LayerKV, MicroStepAttention, VerifyRows
from sglang_sparsespec.attention.torch_reference import TorchAttention

WORKSPACE_BYTES = 256 << 20


class FlashInferAttention(MicroStepAttention):
    """The interface on `BatchDecodeWithPagedKVCacheWrapper`: CUDA cores for drafts, tensor cores for verification.

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
        # The kernels of one micro-step run in stream order, but each wrapper's plan lives in its own workspace.
        self._verify_wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros_like(workspace), "NHD", use_tensor_cores=True
        )
        self._drafts: DraftRows | None = None
        self._draft_heads = 0
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
        self._draft_wrapper._paged_kv_indices_buf = pages.to(torch.int32).flatten()
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
        bounds = [bound for bound in rows.bounds for _ in range(index_heads)]
        self._plan(
            self._draft_wrapper,
            bounds,
            rows.lengths.repeat_interleave(index_heads),
            stride=rows.width,
            heads=self._heads // index_heads if index_heads > 1 else self._heads,
            kv_heads=self._kv_heads if index_heads == 1 else 1,
            scale=scale,
            disable_split_kv=not rows.exact,
        )
        self._draft_heads = index_heads

    def _plan_verifies(self, rows: VerifyRows, scale: float) -> None:
        lengths = [first + rows.padded_queries for first in rows.first_cpu]
        self._plan(
            self._verify_wrapper,
            lengths,
            rows.first + rows.padded_queries,
            stride=rows.width,
            heads=self._heads,
            kv_heads=self._kv_heads,
            scale=scale,
            q_len_per_req=rows.padded_queries,
        )
        self._verify_wrapper._paged_kv_indices_buf = self._req_to_token[rows.pools, : rows.width].flatten()
        self._verify_planned = True

    def _plan(
        self,
        wrapper: Any,
        bounds: Sequence[int],
        lengths: torch.Tensor,
        *,
        stride: int,
        heads: int,
        kv_heads: int,
        scale: float,
        **more: Any,
    ) -> None:
        """Plan by what the host knows, then point the wrapper at rows of a fixed stride with their true lengths.

        Split rows must be planned exactly: their number of splits follows from the length on both sides.
        """
        device = lengths.device
        indptr = torch.tensor([0, *bounds], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        wrapper.plan(
            indptr,
            torch.empty(int(indptr[-1]), dtype=torch.int32, device=device),
            torch.ones(len(bounds), dtype=torch.int32),
            heads,
            kv_heads,
            self._head_dim,
            1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=scale,
            **more,
        )
        wrapper._paged_kv_indptr_buf = (
            torch.arange(len(bounds) + 1, dtype=torch.int32, device=device) * stride
        )
        wrapper._paged_kv_last_page_len_buf = (lengths - (stride - 1)).to(torch.int32)
