"""PillarAttn: the tokens that got most attention in the last verification (arXiv 2512.01278, section 4.2)."""

from __future__ import annotations

import torch

from sglang_sparsespec.selection.interface import Selector


class PillarSelector(Selector):
    """Ranks by attention probability, averaged over all verify queries and the heads of the index scope."""

    needs_scores = True

    def rank(self, scores: torch.Tensor | None, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
        if scores is None:
            raise ValueError("PillarSelector needs the scores of a verification, got None.")
        return scores[..., :width]
