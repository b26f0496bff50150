"""A micro-step as tensors: token ids, positions, KV slots and rows, from the plan and the device state."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch

from sglang_sparsespec.attention.interface import DraftRows, VerifyRows
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.planner import MicroStep
from sglang_sparsespec.rounds.state import RequestState


@dataclass(frozen=True)
class MicroStepBatch:
    """One forward. Tokens stand draft rows first, then verify rows, each row's queries together."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64
    token_pools: torch.Tensor  # [T] int64
    row_pools: torch.Tensor  # [rows] int64
    row_prefix: torch.Tensor  # [rows] int64: KV tokens before the row's first query
    drafts: DraftRows | None
    verifies: VerifyRows | None
    draft_requests: torch.Tensor  # [n] int64: rows of the round's batch
    draft_at: torch.Tensor  # [n] int64: which draft of the cycle, 0-based
    verify_requests: torch.Tensor  # [R] int64
    verify_gather: (
        torch.Tensor
    )  # [R, Q] int64: token of each padded query, counted from the first verify token
    verify_flat: torch.Tensor  # [Tv] int64: place of each verify token among the R * Q padded queries
    scored: bool = True  # whether its verifications make new selections

    @property
    def draft_count(self) -> int:
        return 0 if self.drafts is None else len(self.drafts)


@dataclass(frozen=True)
class RoundInputs:
    """What a round starts from."""

    pools: torch.Tensor  # [B] int64
    committed: torch.Tensor  # [B] int64, advanced in place by the round's verifications
    committed_cpu: Sequence[int]  # [B] when the round started
    base_cpu: Sequence[int]  # [B] prefix that each selection was made from, when the round started
    scored: bool = True  # whether the round's verifications make new selections


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers of the host as an int64 tensor, without waiting for the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def build_micro_step(
    step: MicroStep,
    inputs: RoundInputs,
    state: RequestState,
    config: SparseSpecConfig,
    req_to_token: torch.Tensor,
    verified: Set[int],
) -> MicroStepBatch:
    """Lay out one micro-step. Reads device state only by indexing: the host never waits.

    Args:
        verified: requests (rows of the round's batch) whose verification this round has already run.
    """
    device = inputs.pools.device

    on_device = partial(to_device, device=device)
    draft_requests = on_device([row.row for row in step.drafts])
    draft_at = on_device([row.drafted for row in step.drafts])
    verify_requests = on_device([row.row for row in step.verifies])
    queries = [row.drafted + 1 for row in step.verifies]
    padded = config.stride + 1
    owner = on_device([r for r, n in enumerate(queries) for _ in range(n)])
    query = on_device([t for n in queries for t in range(n)])
    starts = [sum(queries[:r]) for r in range(len(queries))]
    gather = [[starts[r] + min(t, n - 1) for t in range(padded)] for r, n in enumerate(queries)]

    draft_pools, verify_pools = inputs.pools[draft_requests], inputs.pools[verify_requests]
    draft_positions = inputs.committed[draft_requests] + draft_at
    first = inputs.committed[verify_requests]
    positions = torch.cat([draft_positions, first[owner] + query])
    token_pools = torch.cat([draft_pools, verify_pools[owner]])
    return MicroStepBatch(
        input_ids=state.tokens[token_pools, torch.cat([draft_at, query])],
        positions=positions,
        out_cache_loc=req_to_token[token_pools, positions].long(),
        token_pools=token_pools,
        row_pools=torch.cat([draft_pools, verify_pools]),
        row_prefix=torch.cat([draft_positions, first]),
        drafts=_draft_rows(step, inputs, state, config, draft_pools, draft_positions, verified),
        verifies=_verify_rows(step, inputs, verify_pools, first, on_device(queries), padded),
        draft_requests=draft_requests,
        draft_at=draft_at,
        verify_requests=verify_requests,
        verify_gather=on_device([t for row in gather for t in row]).view(-1, padded),
        verify_flat=owner * padded + query,
        scored=inputs.scored,
    )


def _draft_rows(
    step: MicroStep,
    inputs: RoundInputs,
    state: RequestState,
    config: SparseSpecConfig,
    pools: torch.Tensor,
    positions: torch.Tensor,
    verified: Set[int],
) -> DraftRows | None:
    if not step.drafts:
        return None
    capacity = state.selected.shape[-1]
    bounds, exact = [], True
    for row in step.drafts:
        committed, base = inputs.committed_cpu[row.row], inputs.base_cpu[row.row]
        if row.row in verified:
            # What the verification accepted is known on the device only: up to k+1 tokens.
            base, exact = committed if inputs.scored else base, False
            committed += config.stride + 1
        bounds.append(min(config.budget(base), capacity) + committed + row.drafted - base + 1)
    lengths = state.selected_len[pools] + positions - state.selected_base[pools] + 1
    return DraftRows(pools=pools, lengths=lengths, width=max(bounds), bounds=tuple(bounds), exact=exact)


def _verify_rows(
    step: MicroStep,
    inputs: RoundInputs,
    pools: torch.Tensor,
    first: torch.Tensor,
    queries: torch.Tensor,
    padded: int,
) -> VerifyRows | None:
    if not step.verifies:
        return None
    # Exact: a request verifies once a round, so its committed length is still the one that the host knows.
    return VerifyRows(
        pools=pools,
        first=first,
        queries=queries,
        first_cpu=tuple(inputs.committed_cpu[row.row] for row in step.verifies),
        padded_queries=padded,
    )
