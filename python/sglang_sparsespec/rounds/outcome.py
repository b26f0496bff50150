"""What a round hands to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoundOutcome:
    """Fresh tensors: the scheduler copies them to the host on another stream while the next round runs."""

    tokens: torch.Tensor  # [B, k+1] int64: accepted drafts, then the bonus token; the rest is undefined
    lengths: torch.Tensor  # [B] int64: accepted drafts + 1
    committed: torch.Tensor  # [B] int64: new committed lengths
    bonus: torch.Tensor  # [B] int64: last token of each request; it has no KV yet
    graphs: bool  # whether every micro-step was a graph replay
