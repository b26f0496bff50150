"""How many drafts the next round makes: k, fewer, or none, which is plain decoding.

Decided once a round and before anything of it is drawn: acceptance stays exact however the number was chosen.
Every rank of a tensor-parallel group must be given the same costs and outcomes, so that all decide alike.
(Cost-based draft lengths: EVICT, and the batch-wide tables of SGLang's DSPARK.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_sparsespec.rounds.costs import Load, StepCosts

# What the acceptance of a draft is taken for before any was seen, and how many drafts that weighs.
PRIOR, PRIOR_WEIGHT = 0.8, 16.0
MEMORY = 0.98  # what a round's counts still weigh a round later
MARGIN = 1.03  # how much better another number of drafts must be; to plain decoding there is none
PROMISE = 1.1  # what drafts must gain, were all of them accepted, for a look at whether they are
DWELL = 8  # rounds before it may change again
PROBE_EVERY = 512  # plain steps between two rounds that look whether drafts are accepted by now

REASONS = (
    "fixed",  # by configuration
    "faster",  # drafts pay
    "load",  # plain: drafts would hardly pay even if all were accepted
    "acceptance",  # plain: too few drafts are accepted
    "probe",  # a round of drafts, to see
)


@dataclass(frozen=True)
class Choice:
    drafts: int
    reason: str  # of REASONS
    unified: bool | None = None  # None: as configured


class RoundPolicy(Protocol):
    """Chooses each round's drafts, and hears of outcomes in the order of the choices."""

    def choose(self, load: Load) -> Choice: ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None: ...


class FixedPolicy:
    """Always k."""

    def __init__(self, stride: int) -> None:
        self._choice = Choice(stride, "fixed")

    def choose(self, load: Load) -> Choice:
        return self._choice

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing is learnt."""


def above(values: Sequence[int], count: int) -> list[int]:
    """How many values exceed 0, 1, ... count - 1."""
    found = [0] * (count + 1)
    for value in values:
        found[min(max(value, 0), count)] += 1
    total, sums = 0, []
    for value in range(count, 0, -1):
        total += found[value]
        sums.append(total)
    return sums[::-1]


class Acceptance:
    """How likely draft i is accepted where all before it were, from recent rounds."""

    def __init__(self, stride: int) -> None:
        self._reached = [PRIOR_WEIGHT] * stride
        self._kept = [PRIOR * PRIOR_WEIGHT] * stride

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round's outcome: drafts made and drafts accepted of each request."""
        # A draft was reached if it was made and all before it were accepted.
        last = [min(made - 1, kept) + 1 for made, kept in zip(drafted, accepted, strict=True)]
        stride = len(self._reached)
        counts = zip(above(last, stride), above(accepted, stride), strict=True)
        for position, (reached, kept) in enumerate(counts):
            if reached:
                self._reached[position] = MEMORY * self._reached[position] + reached
                self._kept[position] = MEMORY * self._kept[position] + kept

    def tokens(self, drafts: int) -> float:
        """Tokens that a verification of so many drafts yields on average, its own included."""
        alive, total = 1.0, 1.0
        for reached, kept in zip(self._reached[:drafts], self._kept[:drafts], strict=True):
            alive *= kept / reached
            total += alive
        return total


class AdaptivePolicy:
    """The round with most tokens a second by the costs and by recent acceptance.

    Args:
        stride: k, the most drafts.
        costs: of micro-steps; shared with whoever corrects them. Unified rounds are considered where they
            were measured.
    """

    def __init__(self, stride: int, costs: StepCosts) -> None:
        self.costs = costs
        self.acceptance = Acceptance(stride)
        widths = costs.widths
        if widths[:1] != [1] or len(widths) < 2:
            raise ValueError(f"verify widths {widths}: plain decoding and one more are needed.")
        self._ways = [
            (width - 1, False) for width in widths
        ]  # (drafts, unified); (0, False) is plain decoding
        if costs.knows_unified:
            self._ways.append((stride, True))
        self._now = Choice(widths[-1] - 1, "faster", False)
        self._since = DWELL  # rounds since the last change
        self._plain = 0  # plain steps since the last draft

    def choose(self, load: Load) -> Choice:
        """The next round for requests of this load."""
        self._since += 1
        best = self._best(load)
        if (best.drafts, best.unified) == (self._now.drafts, self._now.unified):
            self._now = best
        elif self._since > DWELL:
            margin = MARGIN if best.drafts else 1.0
            if self._speed(best, load) > margin * self._speed(self._now, load):
                self._now, self._since = best, 0
        self._plain = 0 if self._now.drafts else self._plain + 1
        if self._plain > PROBE_EVERY and self._now.reason == "acceptance":
            self._plain = 0
            return Choice(self._ways[1][0], "probe", False)
        return self._now

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.acceptance.observe(drafted, accepted)

    def _best(self, load: Load) -> Choice:
        choices = [Choice(drafts, "faster", unified) for drafts, unified in self._ways]
        best = max(choices, key=lambda choice: self._speed(choice, load))
        if best.drafts:
            return best
        plain = 1 / self.costs.round_us(load, 0)
        hopeless = all((c.drafts + 1) / self._us(c, load) < PROMISE * plain for c in choices[1:])
        return Choice(0, "load" if hopeless else "acceptance", False)

    def _us(self, choice: Choice, load: Load) -> float:
        if choice.unified:
            return self.costs.unified_us(load, choice.drafts)
        return self.costs.round_us(load, choice.drafts)

    def _speed(self, choice: Choice, load: Load) -> float:
        """Tokens a microsecond of each request."""
        return self.acceptance.tokens(choice.drafts) / self._us(choice, load)
