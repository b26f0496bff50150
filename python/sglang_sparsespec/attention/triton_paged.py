"""Paged attention in Triton (sgl_kernel_ext): CUDA graphs on GPUs that FlashAttention 3 does not serve."""

from __future__ import annotations

import torch

from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged import HeadRows, PagedAttention


class TritonPagedAttention(PagedAttention):
    """Draft and verify rows on `paged_attention`, page size 1, split over the keys by device-side lengths."""

    name = "triton"

    def __init__(self) -> None:
        from sgl_kernel_ext.paged_attention import paged_attention

        self._attend = paged_attention

    def draft(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        each = HeadRows.split(layer, q, pages, lengths)
        lse = torch.empty(each.q.shape[:2], dtype=torch.float32, device=q.device)
        out, _ = self._attend(
            each.q,
            each.k,
            each.v,
            each.pages,
            each.lengths,
            None,
            most_queries=1,
            scale=layer.scale,
            lse=lse.t(),
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )
        return out.view(q.shape), lse.view(q.shape[:2])

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
