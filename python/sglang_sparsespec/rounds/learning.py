"""Corrects the costs of rounds by what they take while the server runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_sparsespec.rounds.costs import KINDS, Load, StepCosts

ROUND = "round"  # the phase from the end of one round to the end of the next
SHARE_EVERY = 64  # rounds
LISTEN_EVERY = 4  # rounds of a known kind: each one that is heard costs the host some microseconds


class Timed(NamedTuple):
    """What a phase was part of."""

    load: Load
    drafts: int
    unified: bool
    total: int | None = None  # drafts verified, where some were looked up


class CostLearner:
    """Listens to the timer and corrects the costs that rounds are chosen by.

    Args:
        costs: that the policy reads.
        share: gives every tensor-parallel rank the first one's value, and must be called by all in the same
            round: ranks that learnt from clocks of their own would choose differently. None for one rank.
    """

    def __init__(self, costs: StepCosts, share: Callable[[Any], Any] | None = None) -> None:
        self.costs = costs
        self._own = copy.deepcopy(costs) if share else costs
        self._share = share
        self._rounds = 0
        self._heard = 0

    def heard(self, phase: str, seconds: float, note: Timed | None) -> None:
        """A phase took so long; `note` is what it was part of."""
        if note is None:
            return
        if phase == ROUND:
            self._heard += 1
            known = self._own.knows_rounds(note.load, note.drafts, unified=note.unified)
            if known and self._heard % LISTEN_EVERY:
                return
            self._own.correct_round(
                note.load, note.drafts, 1e6 * seconds, unified=note.unified, total=note.total
            )
        elif phase in KINDS:
            self._own.correct(phase, note.load, note.total or note.drafts, 1e6 * seconds)

    def next_round(self) -> None:
        """A round is about to be chosen."""
        self._rounds += 1
        if self._share is not None and self._rounds % SHARE_EVERY == 0:
            self.costs.take(self._share(self._own.learnt()))
