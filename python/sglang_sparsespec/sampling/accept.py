"""Drafting and acceptance: exact rejection sampling against what the drafts were really drawn from.

A sampled draft comes from the M most likely tokens of the draft distribution, renormalised; those ids and
probabilities are all that is kept. They *are* the proposal, so acceptance with min(1, p/q) and the residual
max(p - q, 0) leave the target distribution exact (Leviathan et al., arXiv 2211.17192, theorem 3.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sparsespec.sampling.filters import SamplingRows, draw, sampling_probs
from sglang_sparsespec.sampling.seeds import Seeds


@dataclass(frozen=True)
class Drafts:
    """One drafted token a row, and the proposal it came from (None where every row is greedy)."""

    tokens: torch.Tensor  # [N] int64
    support_ids: torch.Tensor | None = None  # [N, M] int64
    support_probs: torch.Tensor | None = None  # [N, M] float32, rows sum to 1


def draft_tokens(
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    support: int,
    generator: torch.Generator | None,
    positions: torch.Tensor | None = None,
    wrong: bool = False,
) -> Drafts:
    """Draft one token a row from the draft logits ([N, V]).

    Args:
        positions: [N] int64, of the tokens whose logits these are; needed where rows have seeds.
        support: M, most tokens that a sampled draft is drawn from.
        wrong: draft the least likely token instead: the test of the rejection path.
    """
    if wrong:
        logits = -logits.float()
        rows = SamplingRows(**{**vars(rows), "top_k": torch.ones_like(rows.top_k), "filters": True})
    if rows.all_greedy:
        return Drafts(logits.argmax(dim=-1))
    probs, ids = sampling_probs(logits, rows).topk(min(support, logits.shape[-1]), dim=-1)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    picked = draw(probs, generator)
    if rows.seeds is not None and positions is not None:
        picked = rows.seeds.over(picked, probs, positions, ids)
    return Drafts(ids.gather(1, picked[:, None]).squeeze(1), ids, probs)


@dataclass(frozen=True)
class Accepted:
    tokens: torch.Tensor  # [R, k+1] int64: accepted drafts, then the bonus token; the rest is undefined
    lengths: torch.Tensor  # [R] int64: accepted drafts + 1
    bonus: torch.Tensor  # [R] int64: the last of them, which has no KV yet


def accept_drafts(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    drafted: torch.Tensor,
    rows: SamplingRows,
    *,
    support_ids: torch.Tensor,
    support_probs: torch.Tensor,
    generator: torch.Generator | None,
    positions: torch.Tensor | None = None,
) -> Accepted:
    """Decide how many drafts of each verified request stand, and draw the token after them.

    Args:
        logits: [R, k+1, V] of the verification, k from 0 up; row r is defined up to `drafted[r]` included.
        drafts: [R, k] int64. drafted: [R] int64, how many of them exist (0..k).
        rows: sampling parameters, a row a request.
        support_ids, support_probs: [R, k, M] the proposals; unused where every row is greedy.
        positions: [R] int64, of the first token verified; needed where rows have seeds.
    """
    k = drafts.shape[1]
    exists = torch.arange(k, device=drafts.device) < drafted[:, None]
    if rows.all_greedy:
        target = logits.argmax(dim=-1)
        stands = (drafts == target[:, :k]) & exists
        accepted = stands.long().cumprod(dim=1).sum(dim=1)
        bonus = target.gather(1, accepted[:, None]).squeeze(1)
        return _pack(drafts, accepted, bonus)

    requests, _, vocabulary = logits.shape
    if k == 0:
        target = sampling_probs(logits.squeeze(1), rows)
        bonus = draw(target, generator)
        if rows.seeds is not None and positions is not None:
            bonus = rows.seeds.over(bonus, target, positions)
        return _pack(drafts, torch.zeros_like(drafted), bonus)
    each = torch.arange(requests, device=drafts.device).repeat_interleave(k + 1)
    target = sampling_probs(logits.reshape(-1, vocabulary), rows.take(each)).view(requests, k + 1, vocabulary)
    p = target[:, :k].gather(2, drafts[..., None]).squeeze(2)
    q = (support_probs * (support_ids == drafts[..., None])).sum(dim=2)
    coin = torch.empty_like(p).uniform_(generator=generator)
    stands = (coin * q < p) & exists
    accepted = stands.long().cumprod(dim=1).sum(dim=1)

    at = accepted[:, None, None]
    p_end = target.gather(1, at.expand(-1, 1, vocabulary)).squeeze(1)
    last = at.clamp(max=k - 1).expand(-1, 1, support_ids.shape[2])
    rejected = (accepted < drafted)[:, None]
    q_end = torch.zeros_like(p_end).scatter_add_(
        1, support_ids.gather(1, last).squeeze(1), support_probs.gather(1, last).squeeze(1) * rejected
    )
    residual = (p_end - q_end).clamp(min=0.0)
    # p and q equal to the last bit leave no residual; a rejection is then a rounding error of the coin.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, p_end)
    bonus = draw(residual, generator)
    if rows.seeds is not None and positions is not None:
        accepted, bonus = _follow_seeds(target, drafts, exists, rows.seeds, positions, accepted, bonus)
    return _pack(drafts, accepted, bonus)


def _follow_seeds(
    target: torch.Tensor,
    drafts: torch.Tensor,
    exists: torch.Tensor,
    seeds: Seeds,
    positions: torch.Tensor,
    accepted: torch.Tensor,
    bonus: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accepted` and `bonus` [R], those of rows with seeds replaced: a draft stands where it is the token
    that the target law [R, k+1, V] takes with the seed's noise, and what follows is such a token too."""
    requests, each, vocabulary = target.shape
    flat = torch.arange(requests, device=target.device).repeat_interleave(each)
    at = positions[flat] + torch.arange(each, device=target.device).repeat(requests)
    picked = seeds.take(flat).pick(target.view(-1, vocabulary), at).view(requests, each)
    stands = ((drafts == picked[:, :-1]) & exists).long().cumprod(dim=1).sum(dim=1)
    last = picked.gather(1, stands[:, None]).squeeze(1)
    return torch.where(seeds.given, stands, accepted), torch.where(seeds.given, last, bonus)


def _pack(drafts: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor) -> Accepted:
    tokens = torch.cat([drafts, bonus[:, None]], dim=1)
    tokens = tokens.scatter(1, accepted[:, None], bonus[:, None])
    return Accepted(tokens, accepted + 1, bonus)
