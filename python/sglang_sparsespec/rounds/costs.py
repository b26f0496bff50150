"""What a micro-step costs: measured at start-up for every graph, and corrected by what rounds really take.

    time(micro-step) = time(its graph over empty slots) + keys read * time(a key)
    time(round) = its micro-steps + what is left

The first term holds weights, products and launches; the second the KV cache, which empty slots do not read,
and selection. Drafts, verifications, plain steps and micro-steps of both kinds have a time of a key each: few
verifications at a time, for one, do not fill a GPU. What is left (the host, copies, what the first two terms
get wrong at a size) is learnt from the time between the ends of rounds, for each kind and size of batch.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("draft", "verify", "plain", "mixed")
# Attention kernels of decoding reach about this share of a plain sum's bandwidth; a start value only.
ATTENTION_SHARE = 0.85
# A value is the median of its last measurements, so that what ran beside a few of them (a prefill's tail, a
# compiler, nobody who asked) does not matter.
LATEST = 9
FEWEST = 3  # measurements that are believed
# Fewer keys than this cost less than the noise of a measurement.
KEYS_WORTH_MEASURING = 4096


@dataclass(frozen=True)
class Load:
    """The requests of a round: contexts, and how much of them a draft attends to, both summed over all."""

    rows: int
    keys: int
    selected: int

    @classmethod
    def of(cls, lengths: Sequence[int], budgets: Sequence[int]) -> Load:
        return cls(len(lengths), sum(lengths), sum(budgets))


@dataclass
class StepCosts:
    """Microseconds of micro-steps and rounds.

    Args:
        graphs: {kind: [(slots, microseconds over empty slots)]}. A kind is the tokens of a verify slot, 0 for
            drafts alone, or "mixed" for drafts and verifications of a unified round.
        key_us: microseconds to read one key and value of all layers.
    """

    graphs: Mapping[int | str, list[tuple[int, float]]]
    key_us: float
    widths: list[int] = field(init=False)  # tokens of a verify slot that were measured, ascending
    _key_us: dict[str, float] = field(init=False)
    _rest_us: dict[tuple[str, int], float] = field(init=False, default_factory=dict)
    _latest: dict[Any, deque[float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for kind, points in self.graphs.items():
            points.sort()
            if not points:
                raise ValueError(f"no graph of width {kind} was measured.")
        self.widths = sorted(kind for kind in self.graphs if isinstance(kind, int) and kind)
        self._key_us = dict.fromkeys(KINDS, self.key_us)

    @property
    def knows_unified(self) -> bool:
        return "mixed" in self.graphs

    def draft_us(self, rows: int, keys: float) -> float:
        """One draft micro-step of `rows` requests that attend to `keys` keys together."""
        return self._over_empty(0, rows) + keys * self._key_us["draft"]

    def verify_us(self, rows: int, drafts: int, keys: float) -> float:
        """The verification of `drafts` drafts each over `keys` keys together; without drafts a plain step."""
        kind = "verify" if drafts else "plain"
        return self._over_empty(self._width(drafts), rows) + keys * self._key_us[kind]

    def round_us(self, load: Load, drafts: int) -> float:
        """A lockstep round of `drafts` drafts each; none: one plain decoding step."""
        return self._lockstep_us(load, drafts) + self._rest(load.rows, drafts, unified=False)

    def rounds_us(self, load: Load, stride: int) -> list[float]:
        """`round_us` of 0, 1 ... `stride` drafts; looks each term up once."""
        draft = self.draft_us(load.rows, load.selected)
        times, start = [self.round_us(load, 0)], 1
        rest = self._rest(load.rows, 1, unified=False)
        for width in self.widths[1:]:
            verify = self.verify_us(load.rows, width - 1, load.keys) + rest
            times += [verify + drafts * draft for drafts in range(start, min(width, stride + 1))]
            start = width
        return times

    def unified_us(self, load: Load, stride: int) -> float:
        """A unified round of k = `stride` drafts: k+1 micro-steps that share the verifications."""
        return self._unified_us(load, stride) + self._rest(load.rows, stride, unified=True)

    def _lockstep_us(self, load: Load, drafts: int) -> float:
        verify = self.verify_us(load.rows, drafts, load.keys)
        return verify + drafts * self.draft_us(load.rows, load.selected) if drafts else verify

    def _unified_us(self, load: Load, stride: int) -> float:
        selected = load.selected * stride * self._key_us["draft"]
        return (
            (stride + 1) * self._over_empty("mixed", load.rows) + load.keys * self._key_us["mixed"] + selected
        )

    def _rest(self, rows: int, drafts: int, *, unified: bool) -> float:
        return self._rest_us.get((_way(drafts, unified), rows.bit_length()), 0.0)

    def _width(self, drafts: int) -> int:
        return next((width for width in self.widths if width > drafts), self.widths[-1])

    def _over_empty(self, kind: int | str, rows: int) -> float:
        points = self.graphs[kind]
        at = bisect.bisect_left(points, (rows, 0.0))
        if at < len(points):
            return points[at][1]  # the smallest graph that has room
        slots, us = points[-1]
        return us * rows / slots

    def correct(self, kind: str, load: Load, drafts: int, us: float) -> None:
        """Learn from one micro-step, of KINDS, that took `us` in a round of so many drafts."""
        if kind == "draft":
            base, keys = self._over_empty(0, load.rows), float(load.selected)
        elif kind == "mixed":
            keys = load.keys / (drafts + 1)
            drafted = load.selected * drafts / (drafts + 1) * self._key_us["draft"]
            base = self._over_empty("mixed", load.rows) + drafted
        else:
            base, keys = self._over_empty(self._width(drafts), load.rows), float(load.keys)
        if keys < KEYS_WORTH_MEASURING:
            return
        if (middle := self._middle(kind, max(us - base, 0.0) / keys)) is not None:
            self._key_us[kind] = middle

    def correct_round(self, load: Load, drafts: int, us: float, *, unified: bool) -> None:
        """Learn from a round that ended `us` after the one before it."""
        modelled = self._unified_us(load, drafts) if unified else self._lockstep_us(load, drafts)
        at = _way(drafts, unified), load.rows.bit_length()
        if (middle := self._middle(at, us - modelled)) is not None:
            self._rest_us[at] = middle

    def _middle(self, at: Any, value: float) -> float | None:
        """The median of the last measurements of `at`, `value` included, once there are enough."""
        latest = self._latest.setdefault(at, deque(maxlen=LATEST))
        latest.append(value)
        return sorted(latest)[len(latest) // 2] if len(latest) >= FEWEST else None

    def learnt(self) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
        """What measurements have changed, for `take`."""
        return dict(self._key_us), dict(self._rest_us)

    def take(self, learnt: tuple[dict[str, float], dict[tuple[str, int], float]]) -> None:
        """Replace what was learnt by what another rank has learnt."""
        self._key_us, self._rest_us = dict(learnt[0]), dict(learnt[1])

    def describe(self) -> dict[str, float]:
        """Nanoseconds of a key by kind, for `/server_info`."""
        return {kind: round(1e3 * us, 4) for kind, us in self._key_us.items()}


def _way(drafts: int, unified: bool) -> str:
    return "unified" if unified else "lockstep" if drafts else "plain"
