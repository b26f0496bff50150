"""Host time of planning a round: budgets, the number of drafts, the plan, and what is counted afterwards.

    cd benchmark/serving
    python planning.py --requests 64

No server, no GPU: the same code that the scheduler's process runs once a round, over made-up graph times.
Medians in microseconds. A busy machine makes them larger; they are hidden as long as the GPU has work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.metrics import AcceptanceMetrics
from sglang_sparsespec.rounds.costs import Load, StepCosts
from sglang_sparsespec.rounds.graphs import verify_widths
from sglang_sparsespec.rounds.learning import LISTEN_EVERY, CostLearner, Timed
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlanner
from sglang_sparsespec.rounds.policy import AdaptivePolicy

ROUNDS = 2000


class Stopwatch:
    """Seconds of named parts, one list for each."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return value

    def medians_us(self) -> dict[str, float]:
        return {name: round(1e6 * statistics.median(all_), 1) for name, all_ in self.seconds.items()}


def made_up_costs(stride: int, most: int) -> StepCosts:
    """Times of the shape that an H200 gives, for graphs of every batch size."""
    sizes = range(1, most + 1)
    graphs: dict[int | str, list[tuple[int, float]]] = {0: [(n, 2300.0 + 50 * n) for n in sizes]}
    for width in verify_widths(stride, adapt=True):
        graphs[width] = [(n, 4800.0 + 14 * width * n) for n in sizes]
    graphs["mixed"] = [(n, 4800.0 + 30 * n) for n in sizes]
    return StepCosts(graphs, 0.04)


def measure(requests: int, stride: int, *, rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of each part of a round's planning, and of all, for so many requests."""
    config = SparseSpecConfig(stride=stride, schedule="auto")
    policy = AdaptivePolicy(stride, made_up_costs(stride, requests))
    learner, planner = CostLearner(policy.costs), RoundPlanner(stride, config.schedule)
    metrics, rng, watch = AcceptanceMetrics(stride), random.Random(1), Stopwatch()
    keys = [RequestKey(pool + 1, 0) for pool in range(requests)]
    for turn in range(rounds):
        lengths = [2000 + 3 * turn + 10 * row for row in range(requests)]
        # As acceptance is in reality, so that the choice is not always the same.
        accepted = [min(stride, int(rng.expovariate(0.3))) for _ in keys]
        began = time.perf_counter()
        budgets = watch("budgets", lambda n=lengths: config.budgets(n))
        load = watch("load", lambda n=lengths, b=budgets: Load.of(n, b))
        choice = watch("choice", lambda at=load: policy.choose(at))
        plan = watch("plan", lambda c=choice: planner.plan_round(keys, c.drafts, unified=c.unified))
        drafted = [choice.drafts] * requests
        watch("counts", lambda d=drafted, b=budgets: metrics.launched(d, b))
        good = [min(made, kept) for made, kept in zip(drafted, accepted, strict=True)]
        watch("outcome", lambda d=drafted, g=good: (metrics.finished(g), policy.observe(d, g)))
        if turn % LISTEN_EVERY == 0:
            note = Timed(load, choice.drafts, plan.unified)
            watch("learning", lambda n=note: learner.heard("draft", 0.004, n))
        watch.seconds.setdefault("all", []).append(time.perf_counter() - began)
    return watch.medians_us()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--stride", type=int, default=8, help="k (default 8)")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    found = {requests: measure(requests, args.stride) for requests in args.requests}
    parts = list(next(iter(found.values())))
    print("requests  " + "  ".join(f"{part:>8}" for part in parts) + "   (median microseconds)")
    for requests, times in found.items():
        print(f"{requests:>8}  " + "  ".join(f"{times[part]:>8.1f}" for part in parts))
    if args.out:
        report = {"format": 1, **results.header(), "stride": args.stride, "median_us": found}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
