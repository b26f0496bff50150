"""Sink + recent window (StreamingLLM, as MagicDec drafts): a control for PillarAttn at the same budget."""

from __future__ import annotations

import torch

from sglang_sparsespec.selection.interface import Selector


class WindowSelector(Selector):
    """Ranks by recency."""

    def rank(self, scores: torch.Tensor | None, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
        at = torch.arange(width, device=prefix_lens.device, dtype=torch.float32)
        return at.expand(len(prefix_lens), 1, width)
