"""Which requests draft and which verify in each micro-step of a round. Pure Python, no torch.

A round has k+1 micro-steps, each one model forward. A request has an *offset* o and verifies at
micro-step o; at
every other micro-step it drafts one token. Between two verifications it therefore drafts exactly k times: at
micro-steps o+1..k of one round and 0..o-1 of the next. Lockstep is the same plan with o = k for all.

When requests finish, the others are moved until verifications per micro-step differ by one at most. A request
that moves to an earlier offset verifies once with fewer drafts; one that moves to a later offset sits out the
micro-steps by which its k drafts are made already.
(SparseSpec, arXiv 2512.01278, section 4.1: unified batch scheduling.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np


@dataclass(frozen=True)
class RequestKey:
    """A request as the KV pool sees it: a row and how often the row has been handed out."""

    pool: int
    generation: int


@dataclass(frozen=True)
class DraftRow:
    """One token of request `row`: the draft after `drafted` drafts of this cycle, fewer than k."""

    row: int  # index into the round's requests
    drafted: int  # drafts made since the last verification, before this one


@dataclass(frozen=True)
class VerifyRow:
    """`drafted` + 1 tokens of request `row`: the last committed token and its drafts."""

    row: int
    drafted: int


# A round has hundreds of rows, the same ones again and again; making them anew takes most of a plan's time.
_draft_row, _verify_row = cache(DraftRow), cache(VerifyRow)


@dataclass(frozen=True)
class MicroStep:
    drafts: tuple[DraftRow, ...]
    verifies: tuple[VerifyRow, ...]

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Drafts and verifications as [n, 2] int32: drafts made so far, row."""
        return _table(self.drafts), _table(self.verifies)


def _table(rows: Sequence[DraftRow | VerifyRow]) -> np.ndarray:
    return np.array([(row.drafted, row.row) for row in rows], dtype=np.int32).reshape(-1, 2)


@dataclass(frozen=True)
class RoundPlan:
    """The micro-steps of one round, in order. Each request verifies in exactly one of them."""

    micro_steps: tuple[MicroStep, ...]

    @property
    def drafts(self) -> int:
        """Drafts of a request that is there for the whole round; 0: plain decoding."""
        return len(self.micro_steps) - 1

    @property
    def unified(self) -> bool:
        """Whether requests verify in different micro-steps."""
        return sum(bool(step.verifies) for step in self.micro_steps) > 1


@dataclass
class _Cycle:
    generation: int
    offset: int
    drafted: int  # drafts waiting for verification when the round starts


class RoundPlanner:
    """Gives every request an offset and lays out rounds.

    Args:
        stride: k, drafts between two verifications, at least 1.
        schedule: "lockstep" (all offsets k), "unified" (least-loaded offset), or "auto": either.

    Every rank of a tensor-parallel group calls it with the same requests in the same order, so all
    decide alike.
    """

    def __init__(self, stride: int, schedule: str) -> None:
        if stride < 1:
            raise ValueError(f"stride is {stride}; at least 1 draft a round is needed.")
        if schedule not in ("lockstep", "unified", "auto"):
            raise ValueError(f"schedule is {schedule!r}; allowed: lockstep, unified, auto.")
        self.stride = stride
        self.schedule = schedule
        self._cycles: dict[int, _Cycle] = {}

    def plan_round(
        self, requests: Sequence[RequestKey], drafts: int | None = None, *, unified: bool | None = None
    ) -> RoundPlan:
        """Plan the next round of `requests` (batch order) and advance their cycles.

        Args:
            drafts: of this round, 0 to k; k by default. A unified round always has k.
            unified: with schedule "auto", whether this round is unified. Nothing is drained for a change:
                what unified rounds leave half drafted is verified, with what is drafted until then, by the
                lockstep round that follows.
        """
        if drafts is None:
            drafts = self.stride
        if unified is None or self.schedule != "auto":
            unified = self.schedule == "unified"
        if not (self.stride if unified else 0) <= drafts <= self.stride:
            kind = "unified" if unified else "lockstep"
            raise ValueError(f"a {kind} round of stride {self.stride} cannot make {drafts} drafts.")
        cycles = self._cycles_of(requests, unified=unified)
        if not unified:
            waiting = False
            for cycle in cycles:
                cycle.offset = drafts
                waiting |= cycle.drafted > 0
            if not waiting:  # and nothing will be
                return _lockstep(len(cycles), drafts)
        return RoundPlan(tuple(self._micro_step(at, cycles) for at in range(drafts + 1)))

    def forget(self) -> None:
        """Drop all cycles: the KV cache was flushed."""
        self._cycles.clear()

    def _cycles_of(self, requests: Sequence[RequestKey], *, unified: bool) -> list[_Cycle]:
        load = [0] * (self.stride + 1)
        known: list[_Cycle | None] = []
        for key in requests:
            cycle = self._cycles.get(key.pool)
            known.append(cycle if cycle is not None and cycle.generation == key.generation else None)
            if known[-1] is not None:
                load[known[-1].offset] += 1
        cycles = []
        for key, cycle in zip(requests, known, strict=True):
            if cycle is None:
                cycle = _Cycle(key.generation, self._offset(load, unified=unified), drafted=0)
                load[cycle.offset] += 1
                self._cycles[key.pool] = cycle
            cycles.append(cycle)
        if unified:
            _rebalance(cycles, load)
        return cycles

    def _offset(self, load: Sequence[int], *, unified: bool) -> int:
        if not unified:
            return self.stride
        # The later of equally loaded offsets: a new request then drafts more before it first verifies.
        return min(range(self.stride, -1, -1), key=lambda offset: load[offset])

    def _micro_step(self, at: int, cycles: Sequence[_Cycle]) -> MicroStep:
        drafts, verifies = [], []
        for row, cycle in enumerate(cycles):
            if at == cycle.offset:
                verifies.append(_verify_row(row, cycle.drafted))
                cycle.drafted = 0
            elif cycle.drafted < self.stride:
                drafts.append(_draft_row(row, cycle.drafted))
                cycle.drafted += 1
        return MicroStep(tuple(drafts), tuple(verifies))


@lru_cache(maxsize=1024)
def _lockstep(requests: int, drafts: int) -> RoundPlan:
    """The plan of requests that have nothing to verify when the round starts."""
    rows = range(requests)
    drafting = (MicroStep(tuple(_draft_row(row, at) for row in rows), ()) for at in range(drafts))
    return RoundPlan((*drafting, MicroStep((), tuple(_verify_row(row, drafts) for row in rows))))


def _rebalance(cycles: Sequence[_Cycle], load: list[int]) -> None:
    """Move requests until the loads of offsets differ by one at most: as few as can be, and as near.

    Args:
        load: requests of each offset.
    """
    if max(load) - min(load) <= 1:
        return
    even, more = divmod(len(cycles), len(load))
    # The offsets that keep one more are those that have most already.
    fuller = sorted(range(len(load)), key=lambda offset: -load[offset])[:more]
    spare = [even + (offset in fuller) for offset in range(len(load))]
    moving = []
    for cycle in cycles:
        if spare[cycle.offset] > 0:
            spare[cycle.offset] -= 1
        else:
            moving.append(cycle)
    free = [offset for offset, count in enumerate(spare) for _ in range(count)]
    # Both in order: no other pairing moves them less in all.
    for cycle, offset in zip(sorted(moving, key=lambda cycle: cycle.offset), free, strict=True):
        cycle.offset = offset


def kv_reserve(stride: int, schedule: str) -> int:
    """KV slots a request needs beyond what the scheduler knows to be committed.

    The scheduler's count lags one round (k+1 tokens) behind the device under overlap. From there,
    lockstep writes at most k+1 positions; unified commits up to k+1 and then drafts up to k more.
    """
    return 2 * stride + 2 if schedule == "lockstep" else 3 * stride + 2
