"""How many drafts the next round makes: k, fewer, or none, which is plain decoding.

Decided once a round and before anything of it is drawn: acceptance stays exact however the number was chosen.
Every rank of a tensor-parallel group must be given the same costs and outcomes, so that all decide alike.
(Cost-based draft lengths: EVICT, and the batch-wide tables of SGLang's DSPARK.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_sparsespec.rounds.costs import StepCosts, round_us

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


class RoundPolicy(Protocol):
    """Chooses each round's drafts, and hears of outcomes in the order of the choices."""

    def choose(self, lengths: Sequence[int], budgets: Sequence[int]) -> Choice: ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None: ...


class FixedPolicy:
    """Always k."""

    def __init__(self, stride: int) -> None:
        self._choice = Choice(stride, "fixed")

    def choose(self, lengths: Sequence[int], budgets: Sequence[int]) -> Choice:
        return self._choice

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing is learnt."""


class Acceptance:
    """How likely draft i is accepted where all before it were, from recent rounds."""

    def __init__(self, stride: int) -> None:
        self._reached = [PRIOR_WEIGHT] * stride
        self._kept = [PRIOR * PRIOR_WEIGHT] * stride

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round's outcome: drafts made and drafts accepted of each request."""
        if not any(drafted):
            return
        for position in range(len(self._reached)):
            reached = sum(made > position <= kept for made, kept in zip(drafted, accepted, strict=True))
            kept = sum(n > position for n in accepted)
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
    """The number of drafts with most tokens a second by the costs and by recent acceptance.

    Args:
        stride: k, the most.
        costs: of micro-steps; shared with whoever corrects them.
    """

    def __init__(self, stride: int, costs: StepCosts) -> None:
        self.costs = costs
        self.acceptance = Acceptance(stride)
        self._drafts = [width - 1 for width in costs.widths]  # 0 is plain decoding
        if self._drafts[0] != 0 or len(self._drafts) < 2:
            raise ValueError(f"verify widths {costs.widths}: plain decoding and one more are needed.")
        self._now = Choice(self._drafts[-1], "faster")
        self._since = DWELL  # rounds since the last change
        self._plain = 0  # plain steps since the last draft
        self.chosen: Counter[tuple[int, str]] = Counter()

    def choose(self, lengths: Sequence[int], budgets: Sequence[int]) -> Choice:
        """The next round's drafts for requests of these contexts and budgets."""
        self._since += 1
        best = self._best(lengths, budgets)
        if best.drafts != self._now.drafts:
            margin = MARGIN if best.drafts else 1.0
            if self._since > DWELL and self._gain(best.drafts, lengths, budgets) > margin:
                self._now, self._since = best, 0
        else:
            self._now = best
        choice = self._now
        self._plain = 0 if choice.drafts else self._plain + 1
        if self._plain > PROBE_EVERY and choice.reason == "acceptance":
            choice, self._plain = Choice(self._drafts[1], "probe"), 0
        self.chosen[choice.drafts, choice.reason] += 1
        return choice

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.acceptance.observe(drafted, accepted)

    def _best(self, lengths: Sequence[int], budgets: Sequence[int]) -> Choice:
        speeds = {n: self._speed(n, lengths, budgets) for n in self._drafts}
        best = max(speeds, key=lambda n: speeds[n])
        if best:
            return Choice(best, "faster")
        hopeless = all(
            (n + 1) / round_us(self.costs, lengths, budgets, n) < PROMISE * speeds[0]
            for n in self._drafts[1:]
        )
        return Choice(0, "load" if hopeless else "acceptance")

    def _speed(self, drafts: int, lengths: Sequence[int], budgets: Sequence[int]) -> float:
        """Tokens a microsecond of each request."""
        return self.acceptance.tokens(drafts) / round_us(self.costs, lengths, budgets, drafts)

    def _gain(self, drafts: int, lengths: Sequence[int], budgets: Sequence[int]) -> float:
        return self._speed(drafts, lengths, budgets) / self._speed(self._now.drafts, lengths, budgets)
