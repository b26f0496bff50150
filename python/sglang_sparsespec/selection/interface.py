"""A selector chooses which KV tokens of the verified prefix a request's drafts attend to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sglang_sparsespec.config import SparseSpecConfig


class Selector(ABC):
    """Chooses `budget` logical positions of each row's prefix.

    Everything after the prefix is kept by the attention itself, so a selection holds positions below the
    prefix
    length only: a key that stood in both would count twice in the softmax.
    """

    needs_scores: bool = False

    def __init__(self, config: SparseSpecConfig) -> None:
        self.config = config

    def budgets(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Positions to keep. `prefix_lens`: [R] int64. Returns [R] int64; `config.budget` on the device."""
        share = -((-prefix_lens * self.config.ratio_ppm) // 1_000_000)
        return torch.minimum(share.clamp(min=self.config.min_tokens) + self.config.kept, prefix_lens)

    @abstractmethod
    def rank(self, scores: torch.Tensor | None, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
        """Importance of every position: [R, H or 1, width] float; higher is kept first.

        Args:
            scores: [R, H, width] attention probabilities from the verification, None unless `needs_scores`.
            prefix_lens: [R] int64. width: at least the longest prefix.
        """

    def select(
        self, scores: torch.Tensor | None, prefix_lens: torch.Tensor, *, width: int, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose positions for every row.

        Returns:
            positions: [R, H or 1, min(capacity, width)] int32, ascending; beyond the count they are `width`.
            counts: [R] int64.
        """
        rank = self.rank(scores, prefix_lens, width).float()
        at = torch.arange(width, device=rank.device)
        prefix = prefix_lens[:, None, None]
        forced = (at < self.config.sink) | (at >= prefix - self.config.recent)
        rank = rank.masked_fill(forced, float("inf")).masked_fill(at >= prefix, float("-inf"))
        counts = self.budgets(prefix_lens).clamp(max=capacity)
        keep = min(capacity, width)
        # Stable: of equal scores the earliest position wins, on every rank alike.
        order = rank.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
        surplus = torch.arange(keep, device=rank.device) >= counts[:, None, None]
        return order.masked_fill(surplus, width).sort(dim=-1).values.to(torch.int32), counts
