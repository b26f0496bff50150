"""Paged attention in Triton (sgl_kernel_ext): CUDA graphs on GPUs that FlashAttention 3 does not serve."""

from __future__ import annotations

import torch

from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged import PagedAttention


class TritonPagedAttention(PagedAttention):
    """Draft and verify rows on `paged_attention`, page size 1, split over the keys by device-side lengths."""

    name = "triton"

    def __init__(self) -> None:
        from sgl_kernel_ext.paged_attention import paged_attention

        self._attend = paged_attention

    def draft(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, dim = q.shape
        index_heads = pages.shape[1]
        if index_heads > 1:
            # Each KV head is a row of its own, over the pool seen as one KV head.
            q = q.reshape(rows * index_heads, heads // index_heads, dim)
            lengths = lengths[:, None].expand(rows, index_heads).reshape(-1).contiguous()
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out, _ = self._attend(
            q,
            layer.k.view(-1, layer.k.shape[1] // index_heads, dim),
            layer.v.view(-1, layer.v.shape[1] // index_heads, dim),
            pages.reshape(len(q), pages.shape[2]),
            lengths,
            None,
            most_queries=1,
            scale=layer.scale,
            lse=lse.t(),
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        return out.view(rows, heads, dim), lse.view(rows, heads)

    def verify(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        most_queries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attend(
            q,
            layer.k,
            layer.v,
            pages,
            lengths,
            starts,
            most_queries=most_queries,
            scale=layer.scale,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
