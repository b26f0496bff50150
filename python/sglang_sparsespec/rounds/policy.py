"""How many drafts the next round makes: k, fewer, or none, which is plain decoding.

Decided once a round and before anything of it is drawn: acceptance stays exact however the number was chosen.
Every rank of a tensor-parallel group must be given the same costs and outcomes, so that all decide alike.
(Cost-based draft lengths: EVICT, and the batch-wide tables of SGLang's DSPARK.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_sparsespec.rounds.costs import FEWEST, Load, StepCosts

# What the acceptance of a first draft is taken for before any was seen: more than can be hoped for. That of a
# later one is taken for what the one before it has. Both weigh as much as so many drafts that were seen.
PRIOR, PRIOR_WEIGHT = 0.95, 8.0
LOOKUP_PRIOR = 0.5  # of the first token that is looked up
MEMORY = 0.98  # what a round's counts weigh a round later
MOST_WEIGHT = 500.0  # drafts that all counts of a position weigh at most, so that many requests are not stiff
MARGIN = 1.03  # how much better another number of drafts must be; to plain decoding there is none
PROMISE = 1.1  # what drafts must gain, were all of them accepted, for a look at whether they are
COMPARE_EVERY = 4  # rounds of as many requests as the one before
DWELL = 8  # rounds before it may change again, unless it was a bad choice:
REGRET = 1.1  # how much better another number of drafts then is
# Rounds without a draft, and with fewer than k, between two that look what is accepted by now; after one that
# was faster than plain decoding the next one comes soon.
PROBE_EVERY, DEEPER_EVERY, AGAIN_AFTER = 256, 128, 8
# Rounds with drafts between two looks at what a plain step takes, which is believed after some of them.
PLAIN_EVERY, PLAIN_STEPS = 256, FEWEST
PROBE_MEMORY = 0.5  # what counts weigh after a look from plain decoding: they are of long ago

REASONS = (
    "fixed",  # by configuration
    "faster",  # drafts pay
    "load",  # plain: drafts would hardly pay even if all were accepted
    "acceptance",  # plain: too few drafts are accepted
    "probe",  # a round of more drafts, or of none, to see
)


# Drafts, whether the round is unified, and drafts verified where lookups fill it. (0, False): plain decoding.
Way = tuple[int, bool] | tuple[int, bool, int]


@dataclass(frozen=True)
class Choice:
    drafts: int
    reason: str  # of REASONS
    unified: bool | None = None  # None: as configured
    total: int | None = None  # drafts verified, where those that are not made are looked up


class RoundPolicy(Protocol):
    """Chooses each round's drafts, and hears of outcomes in the order of the choices."""

    def choose(self, load: Load) -> Choice: ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int], total: int | None = None) -> None: ...


class FixedPolicy:
    """Always k."""

    def __init__(self, stride: int) -> None:
        self._choice = Choice(stride, "fixed")

    def choose(self, load: Load) -> Choice:
        return self._choice

    def observe(self, drafted: Sequence[int], accepted: Sequence[int], total: int | None = None) -> None:
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


def of_drafts(drafted: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """What was accepted of the drafts themselves, without what was looked up behind them."""
    return [min(made, kept) for made, kept in zip(drafted, accepted, strict=True)]


class Acceptance:
    """How likely draft i is accepted where all before it were, from recent rounds.

    Positions that recent rounds did not reach are taken for as good as the one before them: what was seen
    there under another load must not keep rounds short.
    """

    def __init__(self, stride: int, prior: float = PRIOR) -> None:
        self._prior = prior
        self._reached = [0.0] * stride
        self._kept = [0.0] * stride

    def observe(self, drafted: Sequence[int], accepted: Sequence[int], *, memory: float = MEMORY) -> None:
        """A round's outcome: drafts made and drafts accepted of each request."""
        # A draft was reached if it was made and all before it were accepted.
        last = [kept + 1 if kept < made else made for made, kept in zip(drafted, accepted, strict=True)]
        if not any(last):
            return  # plain steps tell nothing
        stride = len(self._reached)
        counts = zip(above(last, stride), above(accepted, stride), strict=True)
        for position, (reached, good) in enumerate(counts):
            total = memory * self._reached[position] + reached
            scale = MOST_WEIGHT / total if total > MOST_WEIGHT else 1.0
            self._reached[position] = scale * total
            self._kept[position] = scale * (memory * self._kept[position] + good)

    def expected(self) -> list[float]:
        """Tokens that a verification of 0, 1 ... k drafts yields on average, its own included."""
        rate, alive, totals = self._prior, 1.0, [1.0]
        for reached, kept in zip(self._reached, self._kept, strict=True):
            rate = (kept + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT)
            alive *= rate
            totals.append(totals[-1] + alive)
        return totals


class AdaptivePolicy:
    """The round with most tokens a second by the costs and by recent acceptance.

    Args:
        stride: k, the most drafts.
        costs: of micro-steps; shared with whoever corrects them. Unified rounds are considered where they
            were measured.
        lookup: whether rounds may be filled with tokens that are looked up.
    """

    def __init__(self, stride: int, costs: StepCosts, *, lookup: bool = False) -> None:
        self.costs = costs
        self.acceptance = Acceptance(stride)
        self.lookups = Acceptance(stride, LOOKUP_PRIOR) if lookup else None  # that follow accepted drafts
        self._unlooked = 0  # rounds since one was filled
        widths = costs.widths
        if widths[:1] != [1] or len(widths) < 2:
            raise ValueError(f"verify widths {widths}: plain decoding and one more are needed.")
        self._stride = stride
        self._half = widths[1] - 1
        self._now = Choice(widths[-1] - 1, "faster", False)
        self._since = DWELL  # rounds since the last change
        self._turn, self._rows, self._size = 0, 0, 0
        self._drafting = 0  # rounds with drafts since any without
        self._worth = 1.0  # tokens that a look from plain decoding must yield to be as fast
        self._unseen = 0  # rounds since the last one of k drafts; of plain steps, since any drafts

    def choose(self, load: Load) -> Choice:
        """The next round for requests of this load."""
        self._since += 1
        self._turn += 1
        # Contexts grow by a few tokens a round: nothing new until then.
        if load.rows == self._rows and self._since > DWELL and self._turn % COMPARE_EVERY:
            return self._probe(load) or self._now
        self._rows = load.rows
        times = self._times(load)
        self._worth = times[self._half, False] / times[0, False]
        tokens = self.acceptance.expected()
        looked = self.lookups.expected() if self.lookups is not None else tokens
        speeds = {way: _expected(way, tokens, looked) / us for way, us in times.items()}
        best, now = max(speeds, key=speeds.__getitem__), _way_of(self._now)
        if best == now:
            self._now = self._because(best, times)
        elif self._since > DWELL or speeds[best] > REGRET * speeds[now]:
            margin = MARGIN if best[0] else 1.0
            if speeds[best] > margin * speeds[now]:
                self._now, self._since = self._because(best, times), 0
        return self._probe(load) or self._now

    def _probe(self, load: Load) -> Choice | None:
        """Another round than the best where the last one of its kind was long ago: of no drafts, or of more,
        unless the load is why there are none."""
        if load.rows.bit_length() != self._size:
            self._size = load.rows.bit_length()
            if self._drafting > PLAIN_EVERY // 4:  # what is known of this size may be old
                self._drafting = max(self._drafting, PLAIN_EVERY - AGAIN_AFTER)
        self._drafting = self._drafting + 1 if self._now.drafts else 0
        if self._drafting > PLAIN_EVERY:
            if self._drafting >= PLAIN_EVERY + PLAIN_STEPS:
                self._drafting = 0
            return Choice(0, "probe", False)
        if self.lookups is not None and self._now.reason != "load":
            self._unlooked = 0 if self._now.total else self._unlooked + 1
            if self._unlooked > DEEPER_EVERY:
                self._unlooked = 0
                return Choice(1, "probe", False, self._stride)
        self._unseen = 0 if self._now.drafts == self._stride else self._unseen + 1
        every = DEEPER_EVERY if self._now.drafts else PROBE_EVERY
        if self._unseen <= every or self._now.reason == "load":
            return None
        self._unseen = 0
        return Choice(self._stride if self._now.drafts else self._half, "probe", False)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int], total: int | None = None) -> None:
        if total and self.lookups is not None:
            self._observe_lookups(self.lookups, drafted, accepted, total)
            accepted = of_drafts(drafted, accepted)
        if self._now.drafts or not any(drafted):
            self.acceptance.observe(drafted, accepted)
            return
        self.acceptance.observe(drafted, accepted, memory=PROBE_MEMORY)
        if 1 + sum(accepted) / len(accepted) > self._worth:
            self._unseen = max(self._unseen, PROBE_EVERY - AGAIN_AFTER)

    def _observe_lookups(
        self, lookups: Acceptance, drafted: Sequence[int], accepted: Sequence[int], total: int
    ) -> None:
        # A lookup is reached where all drafts before it were accepted.
        more = [
            (total - made, kept - made) for made, kept in zip(drafted, accepted, strict=True) if kept >= made
        ]
        if more:
            lookups.observe([most for most, _ in more], [kept for _, kept in more])
            if not self._now.total and sum(kept for _, kept in more) >= len(more):
                self._unlooked = max(self._unlooked, DEEPER_EVERY - AGAIN_AFTER)

    def _times(self, load: Load) -> dict[Way, float]:
        """Microseconds of each way to make a round."""
        lockstep = self.costs.rounds_us(load, self._stride)
        times: dict[Way, float] = {(drafts, False): us for drafts, us in enumerate(lockstep)}
        if self.costs.knows_unified:
            times[self._stride, True] = self.costs.unified_us(load, self._stride)
        if self.lookups is not None:
            times |= {(made, False, total): us for (made, total), us in self.costs.filled_us(load).items()}
        return times

    def _because(self, way: Way, times: dict[Way, float]) -> Choice:
        drafts, unified, *total = way
        if drafts:
            return Choice(drafts, "faster", unified, *total)
        plain = 1 / times[0, False]
        hopeless = all(
            (_verified(other) + 1) / us < PROMISE * plain for other, us in times.items() if other[0]
        )
        return Choice(0, "load" if hopeless else "acceptance", False)


def _way_of(choice: Choice) -> Way:
    way = (choice.drafts, bool(choice.unified))
    return (*way, choice.total) if choice.total else way


def _verified(way: Way) -> int:
    """Drafts verified, those that are looked up included."""
    return way[2] if len(way) == 3 else way[0]


def _expected(way: Way, tokens: Sequence[float], looked: Sequence[float]) -> float:
    """Tokens that a verification yields: of drafts, and of lookups where all drafts were right."""
    drafts, more = way[0], _verified(way) - way[0]
    if not more:
        return tokens[drafts]
    return tokens[drafts] + (tokens[drafts] - tokens[drafts - 1]) * (looked[more] - 1)
