"""What follows a micro-step's logits: drafts are stored, verifications accepted, requests move on."""

from __future__ import annotations

import torch

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.outcome import VerifiedLogits
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.sampling.accept import Accepted, accept_drafts, draft_tokens
from sglang_sparsespec.sampling.adjust import Adjustment
from sglang_sparsespec.sampling.filters import SamplingRows


def store_drafts(
    state: RequestState,
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    pools: torch.Tensor,
    drafted: torch.Tensor,
    positions: torch.Tensor,
    config: SparseSpecConfig,
    generator: torch.Generator,
    requests: torch.Tensor,
    adjustment: Adjustment | None = None,
) -> None:
    """Draw one draft a row and keep it with its proposal.

    Args:
        logits: [n, V]. rows: sampling parameters of the n rows.
        pools, drafted: [n] int64: the request, and how many drafts it has made before this one.
        positions: [n] int64, of the tokens that the rows read.
        requests: [n] int64, places in the batch, by which `adjustment` knows them.
    """
    if adjustment is not None:
        logits = adjustment.of_drafts(logits, requests, state.tokens[pools, 1:], drafted)
    drafts = draft_tokens(
        logits,
        rows,
        support=config.draft_support,
        generator=generator,
        positions=positions,
        wrong=config.debug_drafts == "wrong",
    )
    state.tokens[pools, drafted + 1] = drafts.tokens
    if drafts.support_ids is not None and drafts.support_probs is not None:
        state.support_ids[pools, drafted] = drafts.support_ids
        state.support_probs[pools, drafted] = drafts.support_probs


def accept_verified(
    state: RequestState,
    logits: torch.Tensor,
    rows: SamplingRows,
    *,
    pools: torch.Tensor,
    drafted: torch.Tensor,
    positions: torch.Tensor,
    generator: torch.Generator,
    requests: torch.Tensor,
    adjustment: Adjustment | None = None,
    kept: VerifiedLogits | None = None,
) -> Accepted:
    """Accept the drafts of verified requests.

    Args:
        logits: [R, Q, V], Q from 1 to k+1. rows: sampling parameters of the R requests.
        pools, drafted: [R] int64; at most Q - 1 drafts. positions: [R] int64, of the first tokens verified.
        requests: [R] int64, places in the batch. kept: gets the logits as they were sampled from.
    """
    drafts = logits.shape[1] - 1
    if adjustment is not None:
        logits = adjustment.of_verifications(logits, requests, state.tokens[pools, 1 : drafts + 1])
    if kept is not None:
        kept.add(requests, logits)
    accepted = accept_drafts(
        logits,
        state.tokens[pools, 1 : drafts + 1],
        drafted,
        rows,
        support_ids=state.support_ids[pools, :drafts],
        support_probs=state.support_probs[pools, :drafts],
        generator=generator,
        positions=positions,
    )
    state.tokens[pools, 0] = accepted.bonus
    if adjustment is not None:
        adjustment.accepted(requests, accepted.tokens, accepted.lengths)
    return accepted
