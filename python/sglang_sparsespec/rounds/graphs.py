"""CUDA graphs of micro-steps: one replay runs inputs, model, selection and acceptance.

SGLang's own decode runner captures the model alone, and fills its inputs from the host before each replay.
Here everything of a micro-step is inside, so that a round costs the host one upload and k+1 replays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_sparsespec import compat
from sglang_sparsespec.metrics import seconds_of
from sglang_sparsespec.rounds.device import DeviceRounds, DeviceStep
from sglang_sparsespec.rounds.planner import MicroStep

TIMED_RUNS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class GraphKey:
    """What a graph has room for."""

    nd: int  # draft slots
    nv: int  # verify slots
    scored: bool  # whether its verify rows make new selections
    width: int = 0  # tokens of a verify slot, 0 where there is none

    @property
    def tokens(self) -> int:
        return self.nd + self.nv * self.width


def verify_widths(stride: int, *, adapt: bool) -> list[int]:
    """Tokens of a verify slot that graphs are captured for: of all k drafts, of half of them, and of none."""
    return sorted({1, (stride + 2) // 2, stride + 1}) if adapt else [stride + 1]


def plan_keys(
    sizes: Sequence[int], *, stride: int, schedule: str, score_every: int, adapt: bool = False
) -> tuple[list[GraphKey], list[int]]:
    """Graphs to capture for batches of up to `max(sizes)` requests, and the batch sizes among them.

    Args:
        schedule: "auto" needs the graphs of both others.
        adapt: lockstep rounds may have fewer drafts than k, down to none, which is plain decoding.

    Lockstep needs drafts alone and verifications alone. Unified mixes them: one request in k+1 verifies in a
    micro-step, because the planner keeps the micro-steps even.
    """
    batch_sizes = sorted(set(sizes))
    keys = set()
    for size in batch_sizes:
        shapes = {(size, 0, 0)}
        if schedule != "unified":
            shapes |= {(0, size, width) for width in verify_widths(stride, adapt=adapt)}
        if schedule != "lockstep":
            # A batch that one graph serves may be larger than that graph's slots over k+1, by rounding.
            shapes.add((size, min(size, -(-size // (stride + 1)) + 1), stride + 1))
        for nd, nv, width in shapes:
            # Nothing is selected where nothing was drafted.
            ways = {False} if width <= 1 else {True, score_every == 1}
            keys |= {GraphKey(nd, nv, scored, width) for scored in ways}
    return sorted(keys, key=lambda key: (key.tokens, key), reverse=True), batch_sizes


class MicroStepGraphs:
    """Captures micro-steps and replays the smallest that fits; runs a micro-step eagerly where none does.

    Args:
        forward: the model over a micro-step; returns the logits of its tokens, [T, V].
        around: entered around every micro-step of a round, outside its graph.
    """

    def __init__(
        self,
        rounds: DeviceRounds,
        forward: Callable[[DeviceStep], torch.Tensor],
        *,
        keys: Sequence[GraphKey],
        around: Callable[[DeviceStep], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.rounds = rounds
        self._forward = forward
        self._around = around or (lambda step: nullcontext())
        self._keys = list(keys)
        self._graphs: dict[GraphKey, tuple[Any, torch.Tensor]] = {}
        self._fitting: dict[GraphKey, GraphKey | None] = {}
        self.eager_micro_steps = 0

    def capture(self) -> None:
        """Capture all graphs, the largest first so that the others reuse its memory.

        Raises:
            RuntimeError: the device's memory does not suffice; the text names the ways out.
        """
        if not self._keys:
            return
        started, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
        try:
            with compat.capture_graphs() as capture_one:
                for key in self._keys:
                    # Empty slots only, and a micro-step counter that the warm-ups leave inside the table.
                    self.rounds.flat_table.zero_()
                    step = self._step(key)
                    self._graphs[key] = capture_one(partial(self._run, step))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"SPARSESPEC ran out of GPU memory while it captured CUDA graphs ({len(self._graphs)} of "
                f"{len(self._keys)} done): {error}. Ways out: a lower --mem-fraction-static, fewer requests "
                "at once (--max-running-requests), smaller graphs (--cuda-graph-max-bs-decode), or "
                "fewer of them (adapt: off)."
            ) from error
        self.rounds.reset()
        logger.info(
            "SPARSESPEC captured %d CUDA graphs in %.1f s, %.2f GiB",
            len(self._graphs),
            time.perf_counter() - started,
            (before - torch.cuda.mem_get_info()[0]) / 2**30,
        )

    def measure(self, keys: Sequence[GraphKey] = ()) -> dict[int | str, list[tuple[int, float]]]:
        """Microseconds of micro-steps over empty slots, as `StepCosts.graphs`.

        Args:
            keys: what to time where nothing was captured.
        """
        times: dict[int | str, list[tuple[int, float]]] = {}
        for key in self._graphs or keys:
            if key.scored or key.width <= 1:
                kind = "mixed" if key.nd and key.nv else key.width
                times.setdefault(kind, []).append((key.nd or key.nv, self._time(key)))
        self.rounds.reset()
        return times

    def _time(self, key: GraphKey) -> float:
        run = self._graphs[key][0].replay if key in self._graphs else partial(self._run, self._step(key))
        best = float("inf")
        for _ in range(TIMED_RUNS):
            # Empty slots, and a micro-step counter that stays inside the table.
            self.rounds.flat_table.zero_()
            best = min(best, seconds_of(run, self.rounds.header.device))
        return 1e6 * best

    def run(self, step: MicroStep, *, scored: bool, width: int = 0) -> tuple[DeviceStep, torch.Tensor]:
        """Run a micro-step of the uploaded round. Returns it with the logits [T, V] of its slots, which the
        next one overwrites.

        Args:
            width: tokens of a verify slot, at least; the host does not know of those that are looked up.
        """
        width = max(width, max(row.drafted for row in step.verifies) + 1) if step.verifies else 0
        wanted = GraphKey(len(step.drafts), len(step.verifies), scored and width > 0, width)
        key = self._fit(wanted)
        if key is None:
            self.eager_micro_steps += 1
            device_step = self._step(wanted)
            with self._around(device_step):
                return device_step, self._run(device_step)
        graph, logits = self._graphs[key]
        device_step = self._step(key)
        with self._around(device_step):
            graph.replay()
        return device_step, logits

    def _step(self, key: GraphKey) -> DeviceStep:
        return self.rounds.step(key.nd, key.nv, scored=key.scored, queries=key.width or None)

    def _fit(self, wanted: GraphKey) -> GraphKey | None:
        if wanted not in self._fitting:
            fits = [
                key
                for key in self._graphs
                if key.nd >= wanted.nd
                and key.nv >= wanted.nv
                and key.width >= wanted.width
                and key.scored == wanted.scored
                and bool(key.nv) == bool(wanted.nv)
            ]
            self._fitting[wanted] = min(fits, key=lambda key: key.tokens, default=None)
        return self._fitting[wanted]

    def _run(self, step: DeviceStep) -> torch.Tensor:
        self.rounds.begin(step)
        logits = self._forward(step)
        self.rounds.finish(step, logits)
        return logits
