"""Attention over page tables and lengths that live on the device: what a CUDA graph replays for any batch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sglang_sparsespec.attention.interface import LayerKV


class PagedAttention(ABC):
    """Attention of draft and verify rows whose shapes are static and whose lengths are not known on the host.

    Rows of length 0 are empty slots: their output is finite and never used.
    """

    name: str

    @abstractmethod
    def draft(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One query token a row over chosen keys.

        Args:
            q: [n, heads, D]. lengths: [n] int32.
            pages: [n, H, width] int32; H = 1: slots; H = KV heads: `slot * H + head`, a selection each.

        Returns:
            out [n, heads, D]; natural-log LSE [n, heads] float32.
        """

    @abstractmethod
    def verify(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        most_queries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several query tokens a row over all keys, causal: the row's last query sees `lengths` keys.

        Args:
            q: [T, heads, D]. pages: [n, W] int32. lengths: [n] int32.
            starts: [n+1] int32, where each row's queries start. most_queries: of any row.

        Returns:
            out [T, heads, D]; natural-log LSE [heads, T] float32.
        """
