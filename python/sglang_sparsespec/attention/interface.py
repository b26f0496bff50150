"""What a micro-step asks of attention, and the interface that every implementation stands behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerKV:
    """One attention layer's query shape and KV buffers."""

    index: int  # position among the attention layers that see all tokens
    k: torch.Tensor  # [slots, Hkv, D]
    v: torch.Tensor  # [slots, Hkv, D]
    scale: float
    heads: int  # Hq
    k_scale: float = 1.0  # what stored fp8 keys are multiplied with
    v_scale: float = 1.0
    window: int | None = None  # keys before its own one that a query sees; None: all
    sinks: torch.Tensor | None = None  # [Hq] learned logits that take part in the softmax, without values

    def starts_group(self, stride: int) -> bool:
        """Whether its scores make a selection: of the layers that see all tokens, every `stride`-th."""
        return self.window is None and self.index % stride == 0


@dataclass(frozen=True)
class DraftRows:
    """Rows of one query that attend to their request's selection and to all tokens since it was made.

    `bound` and `width` are known to the host without asking the device.
    """

    pools: torch.Tensor  # [n] int64
    lengths: torch.Tensor  # [n] int64: KV tokens attended to, the row's own one included
    width: int  # upper bound of `lengths`
    bounds: tuple[int, ...]  # each length, or an upper bound of it
    exact: bool  # whether `bounds` are the lengths

    def __len__(self) -> int:
        return len(self.bounds)


@dataclass(frozen=True)
class VerifyRows:
    """Rows of up to Q queries that attend to all their request's KV, causally.

    Queries are padded to Q = k+1 a row. A padded query sits behind the real ones, sees slots that hold
    anything,
    and its output is dropped.
    """

    pools: torch.Tensor  # [R] int64
    first: torch.Tensor  # [R] int64: position of the first query
    queries: torch.Tensor  # [R] int64: real queries
    first_cpu: tuple[int, ...]  # `first`, exact, on the host
    padded_queries: int  # Q

    def __len__(self) -> int:
        return len(self.first_cpu)

    @property
    def width(self) -> int:
        """KV tokens of the longest row, padded queries included."""
        return max(self.first_cpu) + self.padded_queries


class MicroStepAttention(ABC):
    """Attention of draft rows and verify rows. The plain-torch one is the reference of all others."""

    name: str

    @abstractmethod
    def plan(self, drafts: DraftRows | None, verifies: VerifyRows | None) -> None:
        """Prepare one micro-step; every layer's calls that follow use these rows."""

    @abstractmethod
    def draft(self, layer: LayerKV, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Sparse attention. q: [n, Hq, D]; slots: [n, H, width] int64, H = 1 or Hkv. Returns [n, Hq, D]."""

    def attend_window(
        self, layer: LayerKV, q: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """A layer with a sliding window. q: [T, Hq, D]; slots: [T, 1, width]; lengths: [T].

        Returns [T, Hq, D].
        """
        raise NotImplementedError(f"attention {self.name} has no sliding windows.")

    @abstractmethod
    def verify(
        self, layer: LayerKV, q: torch.Tensor, *, scores: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Full causal attention. q: [R, Q, Hq, D].

        Returns:
            out [R, Q, Hq, D], and where `scores` is asked for [R, Hkv, width] float32: the probability
            that each
            KV token got, averaged over the row's real queries that see it and over the heads of the KV group.
        """

    @abstractmethod
    def tail_scores(self, layer: LayerKV, q: torch.Tensor, rows: VerifyRows) -> torch.Tensor:
        """The scores alone, for the last queries of a prefill: they seed the first round. As in `verify`."""
