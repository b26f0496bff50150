"""What SPARSESPEC counts, where it can be read, and how selection is timed without making the device wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_sparsespec.rounds.policy import above, of_drafts


def seconds_of(work: Callable[[], Any], device: torch.device | str) -> float:
    """Wall time of `work`, what it launches on the device included. Waits for the device before and after."""
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


class PhaseTimer:
    """Time of named phases. On a GPU by event pairs, which are read only once they have passed.

    Args:
        device: the device that phases run on.
        sample: every how many phases one is timed on a GPU.
    """

    def __init__(self, device: torch.device | str, *, sample: int = 64) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._sample = sample
        self._calls: dict[str, int] = {}
        self._timed: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, Any, Any, Any]] = deque()
        self._lap: Any = None  # when the last lap ended
        self.note: Any = None  # handed to the listener with the phases that begin from now on
        self.listener: Callable[[str, float, Any], None] | None = None  # (phase, seconds, note)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        calls = self._calls.get(name, 0)
        self._calls[name] = calls + 1
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start, self.note)
        elif calls % self._sample:
            yield
        else:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((name, begin, end, self.note))

    def lap(self, name: str) -> None:
        """A lap ends here, which began at the end of the lap before it."""
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        before, self._lap = self._lap, now
        if before is None:
            return
        if self._cuda:
            self._pending.append((name, before, now, self.note))
        else:
            self._add(name, now - before, self.note)

    def break_laps(self) -> None:
        """Something else comes between the last lap and the next one."""
        self._lap = None

    def _add(self, name: str, seconds: float, note: Any) -> None:
        self._timed[name] = self._timed.get(name, 0) + 1
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self.listener is not None:
            self.listener(name, seconds, note)

    def collect(self) -> None:
        """Read the events that have passed."""
        while self._pending and self._pending[0][2].query():
            name, begin, end, note = self._pending.popleft()
            self._add(name, begin.elapsed_time(end) / 1e3, note)

    def mean_us(self, name: str) -> float:
        """Mean duration of one phase in microseconds; 0 before any was measured."""
        self.collect()
        timed = self._timed.get(name, 0)
        return 1e6 * self._seconds[name] / timed if timed else 0.0


class AcceptanceMetrics:
    """Counts of drafts and acceptances since the server started, by position in the round.

    Launches and outcomes come in the same order, one round apart under overlap scheduling.
    """

    def __init__(self, stride: int) -> None:
        self.rounds = 0
        self.plain_steps = 0
        self.unified_rounds = 0
        self.by_drafts: Counter[int] = Counter()
        self.by_reason: Counter[str] = Counter()
        self.verifications = 0
        self.drafted = [0] * stride
        self.accepted = [0] * stride
        self.budget_tokens = 0
        self.budget_rows = 0
        self.filled_rounds = 0
        self.looked_up = 0  # accepted tokens that were looked up
        self._launched: deque[tuple[list[int], list[int], int | None]] = deque(maxlen=64)
        self._prometheus: _Prometheus | None = None
        self._eager_seen = 0

    def enable_prometheus(self, labels: dict[str, str]) -> None:
        """Also count in Prometheus; the scheduler process exports through SGLang's own /metrics."""
        self._prometheus = _Prometheus(labels, len(self.drafted))

    def chose(self, drafts: int, reason: str, *, unified: bool = False) -> None:
        """The next round makes so many drafts, for a reason of `rounds.policy.REASONS`."""
        self.by_drafts[drafts] += 1
        self.unified_rounds += unified
        self.by_reason[reason] += 1
        if self._prometheus is not None:
            self._prometheus.chose(drafts, reason, "unified" if unified else "lockstep")

    def launched(self, drafted: Sequence[int], budgets: Sequence[int], total: int | None = None) -> None:
        """A round was launched; `drafted[i]` drafts of request i will be verified, from `budgets[i]` tokens,
        and with tokens that are looked up as many as `total` where that is given."""
        self._launched.append((list(drafted), list(budgets), total))

    def finished(self, accepted: Sequence[int]) -> tuple[list[int], int | None] | None:
        """The outcome of the oldest launched round: accepted drafts of each request.

        Returns the drafts that each had made, and how many were verified where some were looked up. None
        where no round is waiting.
        """
        if not self._launched:
            return None
        drafted, budgets, total = self._launched.popleft()
        if len(drafted) != len(accepted):
            raise RuntimeError(f"outcome of {len(accepted)} requests for a round of {len(drafted)}.")
        if drafted and not any(drafted):
            self.plain_steps += 1
            return drafted, total
        self.rounds += 1
        looked_up = 0
        if total:
            own = of_drafts(drafted, accepted)
            looked_up, accepted = sum(accepted) - sum(own), own
            self.filled_rounds += 1
            self.looked_up += looked_up
        self.verifications += len(accepted)
        self.budget_tokens += sum(budgets)
        self.budget_rows += len(budgets)
        for position, count in enumerate(above(drafted, len(self.drafted))):
            self.drafted[position] += count
        for position, count in enumerate(above(accepted, len(self.accepted))):
            self.accepted[position] += count
        if self._prometheus is not None:
            self._prometheus.observe(drafted, accepted, budgets, looked_up)
        return drafted, total

    def eager(self, micro_steps: int) -> None:
        """So many micro-steps ran outside CUDA graphs since the server started."""
        if self._prometheus is not None:
            self._prometheus.eager(micro_steps - self._eager_seen)
        self._eager_seen = micro_steps

    def snapshot(self) -> dict[str, Any]:
        """For `/server_info`. Acceptance of a position is of all drafts made there, not only of those
        reached."""
        return {
            "rounds": self.rounds,
            "plain_steps": self.plain_steps,
            "unified_rounds": self.unified_rounds,
            "rounds_by_drafts": {str(n): count for n, count in sorted(self.by_drafts.items())},
            "rounds_by_reason": dict(sorted(self.by_reason.items())),
            "verifications": self.verifications,
            "drafted_tokens": sum(self.drafted),
            "accepted_tokens": sum(self.accepted),
            "filled_rounds": self.filled_rounds,
            "looked_up_tokens": self.looked_up,
            "accept_length": (
                1 + (sum(self.accepted) + self.looked_up) / self.verifications if self.verifications else None
            ),
            "acceptance_by_position": [
                round(kept / made, 4) if made else None
                for made, kept in zip(self.drafted, self.accepted, strict=True)
            ],
            "budget_tokens_mean": self.budget_tokens / self.budget_rows if self.budget_rows else None,
        }


class _Prometheus:
    def __init__(self, labels: dict[str, str], stride: int) -> None:
        from prometheus_client import Counter, Gauge

        names = list(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(f"sparsespec_{name}", text, [*names, *more])

        self._labels = labels
        self._stride = stride
        self._drafted = counter("drafted_tokens", "Draft tokens verified, by position.", "position")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted, by position.", "position")
        self._verifications = counter("verifications", "Verified requests, one count a round each.")
        self._rounds = counter("rounds", "Rounds whose outcome is known.")
        self._chosen = counter(
            "rounds_chosen", "Rounds by drafts, why, and how.", "drafts", "reason", "schedule"
        )
        self._eager = counter("eager_micro_steps", "Micro-steps that ran outside CUDA graphs.")
        self._looked_up = counter("looked_up_tokens", "Accepted tokens that were looked up in the context.")
        self._budget = Gauge(
            "sparsespec_budget_tokens",
            "Mean KV tokens that a draft selects, in the last round.",
            names,
            multiprocess_mode="mostrecent",
        )

    def chose(self, drafts: int, reason: str, schedule: str) -> None:
        self._chosen.labels(**self._labels, drafts=str(drafts), reason=reason, schedule=schedule).inc()

    def eager(self, micro_steps: int) -> None:
        self._eager.labels(**self._labels).inc(micro_steps)

    def observe(
        self, drafted: Sequence[int], accepted: Sequence[int], budgets: Sequence[int], looked_up: int
    ) -> None:
        self._looked_up.labels(**self._labels).inc(looked_up)
        self._rounds.labels(**self._labels).inc()
        self._verifications.labels(**self._labels).inc(len(accepted))
        if budgets:
            self._budget.labels(**self._labels).set(sum(budgets) / len(budgets))
        counts = zip(above(drafted, self._stride), above(accepted, self._stride), strict=True)
        for position, (made, kept) in enumerate(counts):
            self._drafted.labels(**self._labels, position=str(position)).inc(made)
            self._accepted.labels(**self._labels, position=str(position)).inc(kept)
