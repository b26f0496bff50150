"""Attention over page tables and lengths that live on the device: what a CUDA graph replays for any batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from sglang_sparsespec.attention.interface import LayerKV


class PagedAttention(ABC):
    """Attention of draft and verify rows whose shapes are static and whose lengths are not known on the host.

    Rows of length 0 are empty slots: their output is finite and never used.
    """

    name: str
    fuses_scores = False  # whether `verify_scored` exists: scores from the verification's own pass over K

    def begin_drafts(self, lengths: torch.Tensor) -> None:  # noqa: B027
        """Told once a micro-step, before its first layer: the `lengths` that `draft` gets for all layers."""

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

    def attend_window(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One query token a row over the keys of its window, as `draft`; pages [T, 1, window + 1]."""
        return self.draft(layer, q, pages, lengths)

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

    def verify_scored(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        rows: ScoredRows,
        target: ScoreTarget,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`verify` of rows in fixed slots, which also adds up the scores of their keys.

        Args:
            q: [R * queries, heads, D]. pages: [R, W] int32.

        Returns:
            out [R * queries, heads, D]; natural-log LSE [heads, R * queries] float32.
        """
        raise NotImplementedError(f"attention {self.name} does not score while it verifies.")


@dataclass(frozen=True)
class HeadRows:
    """Draft rows in which each index head is a row of its own, over the pool seen as KV heads / H heads."""

    q: torch.Tensor  # [n * H, heads / H, D]
    k: torch.Tensor  # [slots * H, KV heads / H, D]
    v: torch.Tensor
    pages: torch.Tensor  # [n * H, width] int32
    lengths: torch.Tensor  # [n * H] int32

    @classmethod
    def split(cls, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor) -> HeadRows:
        """From the arguments of `PagedAttention.draft`; copies nothing where the heads share a selection."""
        rows, heads, dim = q.shape
        index_heads = pages.shape[1]
        if index_heads > 1:
            q = q.reshape(rows * index_heads, heads // index_heads, dim)
            # One row expands to a tensor of stride 0, which kernels refuse.
            lengths = lengths[:, None].expand(rows, index_heads).reshape(-1).contiguous()
        k, v = (t.view(-1, t.shape[1] // index_heads, dim) for t in (layer.k, layer.v))
        return cls(q, k, v, pages.reshape(len(q), -1), lengths)


@dataclass(frozen=True)
class ScoredRows:
    """Verify rows in fixed slots of `queries` tokens each, as the score and select kernels take them."""

    pools: torch.Tensor  # [R] int32
    first: torch.Tensor  # [R] int32 tokens before the row's first query
    real: torch.Tensor  # [R] int32 real queries; 0: empty slot
    prefix: torch.Tensor  # [R] int32 keys that get a score
    offset: torch.Tensor  # [R] int64 start of the row's scores; -1: they are left out
    queries: int


@dataclass(frozen=True)
class ScoreTarget:
    """Where a verification adds its scores, and what it normalises them with."""

    sums: torch.Tensor  # [capacity] or [KV heads, capacity] int32 fixed point
    reference_lse: torch.Tensor  # [R, queries, heads] float32 estimate; -inf leaves a query out
    shift: int  # binary places of `sums`
    scope: str  # "layer" or "kv_head"
