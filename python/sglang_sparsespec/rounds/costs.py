"""What a micro-step costs: measured at start-up for every graph, and corrected by what rounds really take.

    time(micro-step) = time(its graph over empty slots) + keys read * time(a key)

The first term holds weights, products and launches; the second the KV cache, which empty slots do not read,
and selection. Drafts, verifications and plain steps each have their own time of a key.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

KINDS = ("draft", "verify", "plain")
# Attention kernels of decoding reach about this share of a plain sum's bandwidth; a start value only.
ATTENTION_SHARE = 0.85
SMOOTHING = 0.05  # weight of a new measurement
# Fewer keys than this cost less than the noise of a measurement.
KEYS_WORTH_MEASURING = 4096


@dataclass
class StepCosts:
    """Microseconds of micro-steps.

    Args:
        graphs: {width: [(slots, microseconds over empty slots)]} by tokens of a verify slot; 0: drafts.
        key_us: microseconds to read one key and value of all layers.
    """

    graphs: dict[int, list[tuple[int, float]]]
    key_us: float
    _key_us: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        for width, points in self.graphs.items():
            points.sort()
            if not points:
                raise ValueError(f"no graph of width {width} was measured.")
        self._key_us = dict.fromkeys(KINDS, self.key_us)

    @property
    def widths(self) -> list[int]:
        """Tokens of a verify slot that were measured, ascending."""
        return sorted(width for width in self.graphs if width)

    def draft_us(self, rows: int, keys: float) -> float:
        """One draft micro-step of `rows` requests that attend to `keys` keys together."""
        return self._over_empty(0, rows) + keys * self._key_us["draft"]

    def verify_us(self, rows: int, drafts: int, keys: float) -> float:
        """The verification of `drafts` drafts each, over `keys` keys together."""
        kind = "verify" if drafts else "plain"
        return self._over_empty(self._width(drafts), rows) + keys * self._key_us[kind]

    def _width(self, drafts: int) -> int:
        return next((width for width in self.widths if width > drafts), self.widths[-1])

    def _over_empty(self, width: int, rows: int) -> float:
        points = self.graphs[width]
        at = bisect.bisect_left(points, (rows, 0.0))
        if at < len(points):
            return points[at][1]  # the smallest graph that has room
        slots, us = points[-1]
        return us * rows / slots

    def correct(self, kind: str, rows: int, drafts: int, keys: float, us: float) -> None:
        """Learn from one micro-step, of KINDS, that took `us`."""
        if keys < KEYS_WORTH_MEASURING:
            return
        width = 0 if kind == "draft" else self._width(drafts)
        seen = max(us - self._over_empty(width, rows), 0.0) / keys
        # Something else ran meanwhile (a prefill's tail, a compiler): no key takes so long.
        if seen < 5 * self.key_us:
            self._key_us[kind] += SMOOTHING * (seen - self._key_us[kind])

    def describe(self) -> dict[str, float]:
        """Nanoseconds of a key by kind, for `/server_info`."""
        return {kind: round(1e3 * us, 4) for kind, us in self._key_us.items()}


def round_us(costs: StepCosts, lengths: Sequence[int], budgets: Sequence[int], drafts: int) -> float:
    """Microseconds of a lockstep round of `drafts` drafts each; none: one plain decoding step.

    Args:
        lengths, budgets: context of each request, and how much of it a draft attends to.
    """
    rows = len(lengths)
    verify = costs.verify_us(rows, drafts, sum(lengths))
    return verify + drafts * costs.draft_us(rows, sum(budgets)) if drafts else verify
