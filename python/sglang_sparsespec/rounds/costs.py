"""What a micro-step costs: measured at start-up for every graph, and corrected by what rounds really take.

    time(micro-step) = time(its graph over empty slots) + keys read * time(a key) + offset
    time(round) = its micro-steps + what is left

The first term holds weights, products and launches; the second the KV cache, which empty slots do not read.
The offset is what these get wrong (selection, a GPU that few requests do not fill, clocks under load): the
median of what was measured lately, for each kind of micro-step and size of batch. It is no factor on keys, or
an error of the first term would be taken for one of theirs, and grow and shrink with them. When the offset
of a verification changes, as it does with contexts where a key costs not quite what it should, then so do
those of the verifications of other lengths, and of plain steps, that are not run. What is left of a round
(the host, copies) is learnt from the time between the ends of rounds.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("draft", "verify", "plain", "mixed")
WAYS = ("plain", "lockstep", "unified")
# Attention kernels of decoding reach about this share of a plain copy's bandwidth. (H200, 8B shape: a
# verification takes 36 ns for a key of all layers, a copy of as many bytes 34.)
ATTENTION_SHARE = 0.95
# A value is the median of its last measurements, so that what ran beside a few of them (a prefill's tail, a
# compiler, nobody who asked) does not matter.
LATEST = 9
FEWEST = 3  # measurements that are believed
OLD = 32  # rounds measured since, after which those of before say nothing of now

Kind = int | str  # of a graph: the tokens of a verify slot, 0 for drafts alone, "mixed" for both at once


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
        graphs: {kind: [(slots, microseconds over empty slots)]}.
        key_us: microseconds to read one key and value of all layers.
    """

    graphs: Mapping[Kind, list[tuple[int, float]]]
    key_us: float
    widths: list[int] = field(init=False)  # tokens of a verify slot that were measured, ascending
    # By kind, or way to make a round, and size of batch.
    _offsets: dict[tuple[Kind, int], float] = field(init=False, default_factory=dict)
    _rests: dict[tuple[str, int], float] = field(init=False, default_factory=dict)
    # By size: by how much offsets of verifications have changed, and by how much when each was measured.
    _drift: dict[int, float] = field(init=False, default_factory=dict)
    _drifted: dict[tuple[Kind, int], float] = field(init=False, default_factory=dict)
    _clock: int = field(init=False, default=0)  # rounds measured
    _seen: dict[tuple[Kind, int], int] = field(init=False, default_factory=dict)  # and when what was
    _latest: dict[tuple[Kind, int], deque[float]] = field(init=False, default_factory=dict)
    _rounds: dict[tuple[str, int], deque[tuple[Load, int, int | None, float]]] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for kind, points in self.graphs.items():
            points.sort()
            if not points:
                raise ValueError(f"no graph of width {kind} was measured.")
        self.widths = sorted(kind for kind in self.graphs if isinstance(kind, int) and kind)

    @property
    def knows_unified(self) -> bool:
        return "mixed" in self.graphs

    def draft_us(self, rows: int, keys: float) -> float:
        """One draft micro-step of `rows` requests that attend to `keys` keys together."""
        return self._modelled(0, rows, keys) + self._offset(0, rows)

    def verify_us(self, rows: int, drafts: int, keys: float) -> float:
        """The verification of `drafts` drafts each over `keys` keys together; without drafts a plain step."""
        width = self._width(drafts)
        return self._modelled(width, rows, keys) + self._offset(width, rows)

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

    def filled_us(self, load: Load) -> dict[tuple[int, int], float]:
        """Lockstep rounds of some drafts that verify more, which are looked up: {(drafts, all that are
        verified): microseconds}. They fill the graphs that there are."""
        draft = self.draft_us(load.rows, load.selected)
        rest = self._rest(load.rows, 1, unified=False)
        times: dict[tuple[int, int], float] = {}
        for width in self.widths[1:]:
            verify = self.verify_us(load.rows, width - 1, load.keys) + rest
            times |= {(drafts, width - 1): verify + drafts * draft for drafts in range(1, width - 1)}
        return times

    def unified_us(self, load: Load, stride: int) -> float:
        """A unified round of k = `stride` drafts: k+1 micro-steps that share the verifications."""
        return self._unified_us(load, stride) + self._rest(load.rows, stride, unified=True)

    def _lockstep_us(self, load: Load, drafts: int, total: int | None = None) -> float:
        verify = self.verify_us(load.rows, total or drafts, load.keys)
        return verify + drafts * self.draft_us(load.rows, load.selected) if drafts else verify

    def _unified_us(self, load: Load, stride: int) -> float:
        step = self._modelled("mixed", load.rows, self._mixed_keys(load, stride))
        return (stride + 1) * (step + self._offset("mixed", load.rows))

    def _mixed_keys(self, load: Load, stride: int) -> float:
        """Keys that a micro-step of a unified round reads: one request in k+1 verifies."""
        return (load.keys + load.selected * stride) / (stride + 1)

    def _modelled(self, kind: Kind, rows: int, keys: float) -> float:
        return self._over_empty(kind, rows) + keys * self.key_us

    def _offset(self, kind: Kind, rows: int) -> float:
        size = rows.bit_length()
        if (kind, size) in self._offsets or not isinstance(kind, int) or kind <= 1:
            drift = self._drift.get(size, 0.0)
            return self._offsets.get((kind, size), 0.0) + drift - self._drifted.get((kind, size), drift)
        # Of a width that was not seen yet: what the nearest one gets wrong.
        seen = [width for width in self.widths if width > 1 and (width, size) in self._offsets]
        nearest = min(seen, key=lambda width: abs(width - kind), default=None)
        return 0.0 if nearest is None else self._offset(nearest, rows)

    def _rest(self, rows: int, drafts: int, *, unified: bool) -> float:
        return self._rests.get((_way(drafts, unified), rows.bit_length()), 0.0)

    def _width(self, drafts: int) -> int:
        return next((width for width in self.widths if width > drafts), self.widths[-1])

    def _over_empty(self, kind: Kind, rows: int) -> float:
        points = self.graphs[kind]
        at = bisect.bisect_left(points, (rows, 0.0))
        if at < len(points):
            return points[at][1]  # the smallest graph that has room
        slots, us = points[-1]
        return us * rows / slots

    def correct(self, kind: str, load: Load, drafts: int, us: float) -> None:
        """Learn from one micro-step, of KINDS, that took `us` in a round that verifies so many drafts."""
        graph: Kind = 0 if kind == "draft" else kind if kind == "mixed" else self._width(drafts)
        keys = {"draft": load.selected, "mixed": self._mixed_keys(load, drafts)}.get(kind, load.keys)
        at = graph, load.rows.bit_length()
        latest = self._latest.setdefault(at, deque(maxlen=LATEST))
        self._drop_old(at, latest)
        latest.append(us - self._modelled(graph, load.rows, keys))
        if len(latest) >= FEWEST:
            self._set_offset(at, _middle(latest))
            self._find_rests(load.rows.bit_length())

    def _drop_old(self, at: tuple[Kind, int], measured: deque[Any]) -> None:
        if self._clock - self._seen.get(at, self._clock) > OLD:
            measured.clear()
        self._seen[at] = self._clock

    def _set_offset(self, at: tuple[Kind, int], us: float) -> None:
        kind, size = at
        if _verifies(kind):
            drift = self._drift.get(size, 0.0)
            if at in self._offsets:
                drift += us - (self._offsets[at] + drift - self._drifted[at])
            self._drift[size] = self._drifted[at] = drift
        self._offsets[at] = us

    def correct_round(
        self, load: Load, drafts: int, us: float, *, unified: bool, total: int | None = None
    ) -> None:
        """Learn from a round that ended `us` after the one before it. total: see `filled_us`."""
        size = load.rows.bit_length()
        at = _way(drafts, unified), size
        rounds = self._rounds.setdefault(at, deque(maxlen=LATEST))
        self._clock += 1
        self._drop_old(at, rounds)
        rounds.append((load, drafts, total, us))
        self._find_rests(size, at[0])

    def knows_rounds(self, load: Load, drafts: int, *, unified: bool) -> bool:
        """Whether many rounds of this kind and size have been measured."""
        return len(self._rounds.get((_way(drafts, unified), load.rows.bit_length()), ())) == LATEST

    def _find_rests(self, size: int, only: str | None = None) -> None:
        """What is left of the last rounds, once what is known of their micro-steps is taken away."""
        for way in (only,) if only else WAYS:
            at = way, size
            rounds = self._rounds.get(at, ())
            if len(rounds) >= FEWEST and self._clock - self._seen[at] <= OLD:
                if way == "unified":
                    left = [us - self._unified_us(load, drafts) for load, drafts, _, us in rounds]
                else:
                    left = [us - self._lockstep_us(load, drafts, total) for load, drafts, total, us in rounds]
                self._rests[at] = _middle(left)

    def learnt(self) -> tuple[dict[tuple[Kind, int], float], dict[tuple[str, int], float]]:
        """What measurements have changed, for `take`."""
        now = {(kind, size): self._offset(kind, 1 << (size - 1)) for kind, size in self._offsets}
        return now, dict(self._rests)

    def take(self, learnt: tuple[dict[tuple[Kind, int], float], dict[tuple[str, int], float]]) -> None:
        """Replace what was learnt by what another rank has learnt."""
        self._offsets, self._rests = dict(learnt[0]), dict(learnt[1])

    def describe(self) -> dict[str, Any]:
        """For `/server_info`: nanoseconds of a key, and microseconds that were learnt, by size of batch."""
        offsets, rests = self.learnt()
        steps = {f"{_name(kind)}, {_sizes(size)}": us for (kind, size), us in offsets.items()}
        rounds = {f"{way} round, {_sizes(size)}": us for (way, size), us in rests.items()}
        learnt = {name: round(us, 1) for name, us in sorted({**steps, **rounds}.items())}
        return {"key_ns": round(1e3 * self.key_us, 3), "learnt_us": learnt}


def _verifies(kind: Kind) -> bool:
    """Whether such a graph verifies (without drafts: a plain step), all its requests at once."""
    return isinstance(kind, int) and kind > 0


def _name(kind: Kind) -> str:
    return {0: "draft", 1: "plain", "mixed": "mixed"}.get(kind, f"verify of {kind} tokens")


def _sizes(size: int) -> str:
    """The batch sizes of so many bits."""
    low, high = 1 << (size - 1), (1 << size) - 1
    return str(low) if low == high else f"{low}-{high}"


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _way(drafts: int, unified: bool) -> str:
    return "unified" if unified else "lockstep" if drafts else "plain"
