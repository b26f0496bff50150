"""SGLang's temperature, top-k, top-p and min-p, as the probabilities that a token is really drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_sparsespec.sampling.seeds import Seeds


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of N logits rows. All tensors are [N]."""

    temperature: torch.Tensor  # float32, > 0
    top_k: torch.Tensor  # int; 1 means greedy
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    all_greedy: bool
    filters: bool  # some row needs top-k, top-p or min-p
    sequential: bool  # top-p after renormalising the top-k, as SGLang's CUDA sampler does beside min-p
    seeds: Seeds | None = None  # None where no row has one

    @classmethod
    def from_batch(cls, info: Any, seeds: Seeds | None = None) -> SamplingRows:
        """From SGLang's `SamplingBatchInfo` of a decode batch, a row a request."""
        return cls(
            temperature=info.temperatures.view(-1).float(),
            top_k=info.top_ks.view(-1),
            top_p=info.top_ps.view(-1).float(),
            min_p=info.min_ps.view(-1).float(),
            all_greedy=bool(info.is_all_greedy),
            filters=bool(
                info.need_top_k_sampling
                or info.need_top_p_sampling
                or info.need_min_p_sampling
                or info.is_any_greedy
            ),
            sequential=bool(info.need_min_p_sampling and info.temperatures.is_cuda),
            seeds=seeds,
        )

    def take(self, rows: torch.Tensor) -> SamplingRows:
        """The parameters of `rows` ([M] int64), in that order; a row may stand in it more than once."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.all_greedy,
            self.filters,
            self.sequential,
            self.seeds and self.seeds.take(rows),
        )


def sampling_probs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Probabilities after all filters. `logits`: [N, V]. Returns [N, V] float32 whose rows sum to 1.

    Greedy rows are one-hot at the first largest logit. Top-p cuts by the mass before a token, top-k by rank,
    min-p relative to the most likely token (sglang/srt/layers/sampler.py).
    """
    return filtered(torch.softmax(logits.float() / rows.temperature[:, None], dim=-1), rows)


def filtered(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Probabilities [N, V] after top-k, top-p and min-p; their rows sum to 1 again."""
    if not rows.filters:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    largest = ordered[:, :1].clone()
    beyond_k = rank >= rows.top_k[:, None]
    if rows.sequential:
        ordered = ordered.masked_fill(beyond_k, 0.0)
        ordered = ordered / ordered.sum(dim=-1, keepdim=True)
        largest = ordered[:, :1].clone()
    before = ordered.cumsum(dim=-1) - ordered
    cut = beyond_k | (before > rows.top_p[:, None]) | (ordered < largest * rows.min_p[:, None])
    ordered = ordered.masked_fill(cut, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, ids, ordered)


def draw(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw one index a row with probability proportional to `weights` ([N, M] >= 0, some > 0). Returns [N].

    The exponential race instead of `torch.multinomial`, which waits for the device to check its input.
    """
    race = torch.empty_like(weights).exponential_(generator=generator).clamp_(min=1e-30)
    return (weights / race).argmax(dim=-1)
