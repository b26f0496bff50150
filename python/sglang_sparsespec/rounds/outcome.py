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
    # [B, k+1, V] of the verifications, where a request wants log-probabilities; zeros where there is none.
    logits: torch.Tensor | None = None


class VerifiedLogits:
    """Collects the logits of a round's verifications, in the order of the batch, if they are wanted.

    Args:
        requests: B. width: k+1.
    """

    def __init__(self, requests: int, width: int, *, wanted: bool) -> None:
        self._shape = (requests, width)
        self._wanted = wanted
        self.logits: torch.Tensor | None = None

    def add(self, requests: torch.Tensor, logits: torch.Tensor) -> None:
        """Verifications of `requests` ([R] int64) gave `logits` [R, Q, V], which the next micro-step may
        overwrite."""
        if not self._wanted:
            return
        if self.logits is None:
            self.logits = logits.new_zeros((*self._shape, logits.shape[-1]))
        self.logits[requests, : logits.shape[1]] = logits
