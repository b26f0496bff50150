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

# What the acceptance of a draft is taken for before any was seen, and how many drafts that weighs: more than
# can be hoped for, so that positions are tried that fewer drafts would never reach.
PRIOR, PRIOR_WEIGHT = 0.95, 8.0
MEMORY = 0.98  # what a round's counts weigh a round later
STALE_WEIGHT = 2.0  # drafts that all counts together weigh at least, long ago as they may be
MARGIN = 1.03  # how much better another number of drafts must be; to plain decoding there is none
PROMISE = 1.1  # what drafts must gain, were all of them accepted, for a look at whether they are
COMPARE_EVERY = 4  # rounds of as many requests as the one before
DWELL = 8  # rounds before it may change again, unless it was a bad choice:
REGRET = 1.1  # how much better another number of drafts then is
# Rounds without a draft, or with fewer than k, between two that look what is accepted by now.
PROBE_EVERY = 512

REASONS = (
    "fixed",  # by configuration
    "faster",  # drafts pay
    "load",  # plain: drafts would hardly pay even if all were accepted
    "acceptance",  # plain: too few drafts are accepted
    "probe",  # a round of more drafts, to see
)


Way = tuple[int, bool]  # drafts, and whether the round is unified; (0, False) is plain decoding


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
    for value in values:  # some tens: arrays would take longer
        found[(value if value < count else count) if value > 0 else 0] += 1
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
        last = [kept + 1 if kept < made else made for made, kept in zip(drafted, accepted, strict=True)]
        stride = len(self._reached)
        counts = zip(above(last, stride), above(accepted, stride), strict=True)
        for position, (reached, good) in enumerate(counts):
            # What was seen long ago still stands, until something is seen.
            weight = max(MEMORY, STALE_WEIGHT / self._reached[position])
            self._reached[position] = weight * self._reached[position] + reached
            self._kept[position] = weight * self._kept[position] + good

    def expected(self) -> list[float]:
        """Tokens that a verification of 0, 1 ... k drafts yields on average, its own included."""
        alive, totals = 1.0, [1.0]
        for reached, kept in zip(self._reached, self._kept, strict=True):
            alive *= kept / reached
            totals.append(totals[-1] + alive)
        return totals


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
        self._stride = stride
        self._half = widths[1] - 1
        self._now = Choice(widths[-1] - 1, "faster", False)
        self._since = DWELL  # rounds since the last change
        self._turn, self._rows = 0, 0
        self._unseen = 0  # rounds since the last one of k drafts; of plain steps, since any drafts

    def choose(self, load: Load) -> Choice:
        """The next round for requests of this load."""
        self._since += 1
        self._turn += 1
        # Contexts grow by a few tokens a round: nothing new until then.
        if load.rows == self._rows and self._since > DWELL and self._turn % COMPARE_EVERY:
            return self._probe() or self._now
        self._rows = load.rows
        times = self._times(load)
        tokens = self.acceptance.expected()
        speeds = {way: tokens[way[0]] / us for way, us in times.items()}
        best, now = max(speeds, key=speeds.__getitem__), (self._now.drafts, bool(self._now.unified))
        if best == now:
            self._now = self._because(best, times)
        elif self._since > DWELL or speeds[best] > REGRET * speeds[now]:
            margin = MARGIN if best[0] else 1.0
            if speeds[best] > margin * speeds[now]:
                self._now, self._since = self._because(best, times), 0
        return self._probe() or self._now

    def _probe(self) -> Choice | None:
        """A round of more drafts where the last ones were long ago and acceptance is why there are none."""
        self._unseen = 0 if self._now.drafts == self._stride else self._unseen + 1
        if self._unseen <= PROBE_EVERY or self._now.reason == "load":
            return None
        self._unseen = 0
        return Choice(self._stride if self._now.drafts else self._half, "probe", False)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.acceptance.observe(drafted, accepted)

    def _times(self, load: Load) -> dict[Way, float]:
        """Microseconds of each way to make a round."""
        lockstep = self.costs.rounds_us(load, self._stride)
        times: dict[Way, float] = {(drafts, False): us for drafts, us in enumerate(lockstep)}
        if self.costs.knows_unified:
            times[self._stride, True] = self.costs.unified_us(load, self._stride)
        return times

    def _because(self, way: Way, times: dict[Way, float]) -> Choice:
        drafts, unified = way
        if drafts:
            return Choice(drafts, "faster", unified)
        plain = 1 / times[0, False]
        hopeless = all((made + 1) / us < PROMISE * plain for (made, _), us in times.items() if made)
        return Choice(0, "load" if hopeless else "acceptance", False)
