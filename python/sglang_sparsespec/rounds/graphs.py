"""CUDA graphs of micro-steps: one replay runs inputs, model, selection and acceptance.

SGLang's own decode runner captures the model alone, and fills its inputs from the host before each replay.
Here everything of a micro-step is inside, so that a round costs the host one upload and k+1 replays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_sparsespec import compat
from sglang_sparsespec.rounds.device import DeviceRounds, DeviceStep
from sglang_sparsespec.rounds.planner import MicroStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class GraphKey:
    """What a graph has room for."""

    nd: int  # draft slots
    nv: int  # verify slots
    scored: bool  # whether its verify rows make new selections


def plan_keys(
    sizes: Sequence[int], *, stride: int, schedule: str, score_every: int
) -> tuple[list[GraphKey], list[int]]:
    """Graphs to capture for batches of up to `max(sizes)` requests, and the batch sizes among them.

    Lockstep needs drafts alone and verifications alone. Unified mixes them: about one request in k+1
    verifies in a micro-step; more do after many requests arrived together, so that each size also has room
    for twice as many and for all.
    """
    batch_sizes = sorted(set(sizes))
    keys = set()
    for size in batch_sizes:
        if schedule == "lockstep":
            pairs = {(size, 0), (0, size)}
        else:
            few = min(size, -(-size // (stride + 1)) + 1)
            pairs = {(size, 0), (size, few), (size, min(size, 2 * few)), (size, size)}
        for nd, nv in pairs:
            keys |= {GraphKey(nd, nv, scored) for scored in ({True, score_every == 1} if nv else {False})}
    return sorted(keys, key=lambda key: (key.nd + key.nv * (stride + 1), key), reverse=True), batch_sizes


class MicroStepGraphs:
    """Captures micro-steps and replays the smallest that fits; runs a micro-step eagerly where none does.

    Args:
        forward: the model over a micro-step; returns the logits of its tokens, [T, V].
    """

    def __init__(
        self,
        rounds: DeviceRounds,
        forward: Callable[[DeviceStep], torch.Tensor],
        *,
        keys: Sequence[GraphKey],
    ) -> None:
        self.rounds = rounds
        self._forward = forward
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
                    step = self.rounds.step(key.nd, key.nv, scored=key.scored)
                    self._graphs[key] = capture_one(partial(self._run, step))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"SPARSESPEC ran out of GPU memory while it captured CUDA graphs ({len(self._graphs)} of "
                f"{len(self._keys)} done): {error}. Ways out: a lower --mem-fraction-static, fewer requests "
                "at once (--max-running-requests), smaller graphs (--cuda-graph-max-bs-decode)."
            ) from error
        self.rounds.reset()
        logger.info(
            "SPARSESPEC captured %d CUDA graphs in %.1f s, %.2f GiB",
            len(self._graphs),
            time.perf_counter() - started,
            (before - torch.cuda.mem_get_info()[0]) / 2**30,
        )

    def run(self, step: MicroStep, *, scored: bool) -> tuple[DeviceStep, torch.Tensor]:
        """Run a micro-step of the uploaded round. Returns it with the logits [T, V] of its slots, which the
        next one overwrites."""
        wanted = GraphKey(len(step.drafts), len(step.verifies), scored and bool(step.verifies))
        key = self._fit(wanted)
        if key is None:
            self.eager_micro_steps += 1
            device_step = self.rounds.step(wanted.nd, wanted.nv, scored=wanted.scored)
            return device_step, self._run(device_step)
        graph, logits = self._graphs[key]
        graph.replay()
        return self.rounds.step(key.nd, key.nv, scored=key.scored), logits

    def _fit(self, wanted: GraphKey) -> GraphKey | None:
        if wanted not in self._fitting:
            fits = [
                key
                for key in self._graphs
                if key.nd >= wanted.nd
                and key.nv >= wanted.nv
                and key.scored == wanted.scored
                and bool(key.nv) == bool(wanted.nv)
            ]
            width = self.rounds.queries
            self._fitting[wanted] = min(fits, key=lambda key: key.nd + key.nv * width, default=None)
        return self._fitting[wanted]

    def _run(self, step: DeviceStep) -> torch.Tensor:
        self.rounds.begin(step)
        logits = self._forward(step)
        self.rounds.finish(step, logits)
        return logits
