"""Seeds of single requests: noise that depends on nothing but seed, position and token.

A seeded request takes, at every position, the token with the largest log-probability plus Gumbel noise, which
draws it from exactly that law. Draft and verification use the same noise, so a draft stands where the
verification takes the same token, and the output is that of the noise alone: whatever was drafted, and
whoever else was served, a request gets the same tokens again as long as its logits are the same. Noise is
that of SGLang's deterministic inference (murmur hash of seed, position of the input token, and token), whose
output it therefore is where no top-k, top-p or min-p is asked for. (SGLang ignores seeds without that mode.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_sparsespec.sampling.upload import upload

WORD = 0xFFFFFFFF
LARGEST = 2.0**-32  # distance to 1 that a uniform number keeps


def seeds_of(batch: Any) -> Seeds | None:
    """Seeds of the requests of SGLang's `ScheduleBatch`; None where none of them draws with one."""
    if batch.sampling_info.is_all_greedy:
        return None
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(seed is None for seed in seeds):
        return None
    device = batch.req_pool_indices.device
    values = upload([seed or 0 for seed in seeds], device, torch.int64)
    return Seeds(values, upload([seed is not None for seed in seeds], device))


class Seeds:
    """Seeds of N rows. values: [N] int64. given: [N] bool, whether the row has one."""

    def __init__(self, values: torch.Tensor, given: torch.Tensor) -> None:
        self.values, self.given = values, given

    def take(self, rows: torch.Tensor) -> Seeds:
        return Seeds(self.values[rows], self.given[rows])

    def pick(
        self, probs: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The column that each row takes.

        Args:
            probs: [N, M] >= 0, some > 0 in every row.
            positions: [N] int64, of the tokens whose logits these are.
            ids: [N, M] int64, tokens of the columns; 0 to M - 1 by default.

        Returns:
            [N] int64; of rows without a seed it means nothing.
        """
        if ids is None:
            ids = torch.arange(probs.shape[1], device=probs.device)[None]
        noise = gumbel(self.values[:, None], positions[:, None], ids)
        return (probs.double().log() + noise).argmax(dim=-1)

    def over(
        self,
        drawn: torch.Tensor,
        probs: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`drawn` [N], the columns of rows with seeds replaced by those that `pick` takes."""
        return torch.where(self.given, self.pick(probs, positions, ids).to(drawn.dtype), drawn)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64, of the broadcast shape of the int64 arguments."""
    uniform = murmur(seeds, positions, ids).double() / WORD
    exponential = -uniform.log().clamp_(min=torch.finfo(torch.float64).min, max=-LARGEST)
    return -exponential.log()


def murmur(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """MurmurHash3, 32 bits, of seed (two words), position and id. Words are the low halves of int64."""
    found = torch.zeros((), dtype=torch.int64, device=seeds.device)
    for word in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD, ids & WORD):
        mixed = _rotated((word * 0xCC9E2D51) & WORD, 15)
        found = found ^ ((mixed * 0x1B873593) & WORD)
        found = (_rotated(found, 13) * 5 + 0xE6546B64) & WORD
    found = found ^ 16  # bytes hashed
    found = ((found ^ (found >> 16)) * 0x85EBCA6B) & WORD
    found = ((found ^ (found >> 13)) * 0xC2B2AE35) & WORD
    return found ^ (found >> 16)


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD


# -- the first token of a request, which SGLang's own sampler draws -------------------------------------

_prefilled: list[Seeds] = []


@contextmanager
def prefilling(seeds: Seeds | None) -> Iterator[None]:
    """The prefill of a batch whose rows have these seeds."""
    if seeds is None:
        yield
        return
    _prefilled.append(seeds)
    try:
        yield
    finally:
        _prefilled.pop()


def sample_prefilled(
    result: Any, sampler: Any, probs: torch.Tensor, info: Any, positions: Any, simple: bool
) -> Any:
    """Hook after SGLang's `Sampler._sample_from_probs`: tokens of rows with seeds are taken by these.

    Args:
        result: (tokens [N], what was captured of the distributions). probs: [N, V], not yet filtered.
    """
    if not _prefilled:
        return None
    from sglang_sparsespec.sampling.filters import SamplingRows, filtered

    seeds, (tokens, captured) = _prefilled[-1], result
    probs = filtered(probs.float(), SamplingRows.from_batch(info))
    return seeds.over(tokens.view(-1), probs, positions), captured
