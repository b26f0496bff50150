"""Verification that scores its keys in the same pass over K: our CUDA kernel beside FlashAttention 3."""

from __future__ import annotations

import torch

from sglang_sparsespec.attention.fa3 import FA3Attention
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged import ScoredRows, ScoreTarget


class FusedAttention(FA3Attention):
    """Our kernel for drafts that share a layer's selection, and for verifications that make selections: those
    emit scores, normalised by the drafts' LSE. FA3 for all else.

    Args:
        heads, kv_heads, head_dim: of this rank's layers. queries: k+1.

    Raises:
        RuntimeError: the kernel does not compile.
    """

    name = "fused"
    fuses_scores = True

    def __init__(
        self, *, heads: int, kv_heads: int, head_dim: int, queries: int, device: torch.device | str
    ) -> None:
        from sgl_kernel_ext import cuda

        super().__init__()
        self._verify_attention = cuda.verify_attention
        group, device = heads // kv_heads, torch.device(device)
        size = max(cuda.workspace_size(head_dim, group, n, device) for n in range(1, queries + 1))
        # The layers of a micro-step run one after the other.
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def begin_drafts(self, lengths: torch.Tensor) -> None:
        # A draft's query is its own last key.
        self._first, self._queries = lengths - 1, lengths.clamp(max=1)

    def draft(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if pages.shape[1] > 1:
            return super().draft(layer, q, pages, lengths)
        out, lse = self._verify_attention(
            q,
            layer.k,
            layer.v,
            pages[:, 0],
            self._first,
            self._queries,
            padded_queries=1,
            scale=layer.scale,
            workspace=self._workspace,
        )
        return out, lse.t()

    def attend_window(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return FA3Attention.draft(self, layer, q, pages, lengths)

    def verify_scored(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        rows: ScoredRows,
        target: ScoreTarget,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._verify_attention(
            q,
            layer.k,
            layer.v,
            pages,
            rows.first,
            rows.real,
            padded_queries=rows.queries,
            scale=layer.scale,
            ref_lse=target.reference_lse,
            offset=rows.offset,
            prefix=rows.prefix,
            score=target.sums,
            shift=target.shift,
            scope=target.scope,
            workspace=self._workspace,
        )
