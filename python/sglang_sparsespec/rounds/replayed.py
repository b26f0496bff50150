"""Rounds whose micro-steps are CUDA-graph replays: the host uploads a table and never sees a length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.metrics import PhaseTimer
from sglang_sparsespec.rounds.device import DeviceRounds, DeviceStep
from sglang_sparsespec.rounds.graphs import GraphKey, MicroStepGraphs
from sglang_sparsespec.rounds.outcome import RoundOutcome, VerifiedLogits
from sglang_sparsespec.rounds.planner import MicroStep, RequestKey, RoundPlan
from sglang_sparsespec.sampling.adjust import Adjustment
from sglang_sparsespec.sampling.filters import SamplingRows
from sglang_sparsespec.sampling.seeds import seeds_of
from sglang_sparsespec.sampling.tail import accept_verified, store_drafts
from sglang_sparsespec.sampling.upload import upload


def _kind(step: MicroStep, plan: RoundPlan) -> str:
    """One of `costs.KINDS`."""
    if not step.verifies:
        return "draft"
    if step.drafts:
        return "mixed"
    return "verify" if plan.drafts else "plain"


def _verified(device_step: DeviceStep, step: MicroStep, logits: torch.Tensor) -> torch.Tensor:
    """The logits of a micro-step's verifications, [R, Q, V]."""
    first, width = device_step.buffers.nd, device_step.buffers.queries
    return logits[first : first + len(step.verifies) * width].view(-1, width, logits.shape[-1])


class ReplayedRounds:
    """Runs rounds on a device-planned attention.

    Greedy batches run wholly inside the graphs. Sampled ones draw their drafts and accept behind each replay,
    on the same stream and without waiting for it.
    """

    def __init__(
        self,
        config: SparseSpecConfig,
        rounds: DeviceRounds,
        forward: Callable[[DeviceStep], torch.Tensor],
        generator: torch.Generator,
        timer: PhaseTimer,
        *,
        keys: Sequence[GraphKey],
        around: Callable[[DeviceStep], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.config, self.rounds, self.state = config, rounds, rounds.state
        self.graphs = MicroStepGraphs(rounds, forward, keys=keys, around=around)
        self._generator = generator
        self._timer = timer
        self._count = 0

    @property
    def eager_micro_steps(self) -> int:
        return self.graphs.eager_micro_steps

    def capture(self) -> None:
        """Capture the graphs, once the model and its pools stand."""
        self.graphs.capture()

    def prefilled(self, batch: Any, keys: list[RequestKey], seeded_rows: list[int]) -> None:
        """A prefill ran. The attention backend keeps the device state of its selections."""
        if self.rounds.history is None:
            return
        pools, lengths = batch.req_pool_indices.long(), batch.seq_lens.long()
        for req, key, length in zip(batch.reqs, keys, batch.seq_lens_cpu.tolist(), strict=True):
            ids = [*req.origin_input_ids, *req.output_ids][:length]
            self.rounds.history[key.pool, :length] = upload(ids, pools.device, torch.int32)
        first = self.state.tokens[pools, :1]
        self.rounds.remember(pools, lengths, first, torch.ones_like(lengths))

    def forget(self) -> None:
        """The KV cache was flushed."""
        self.rounds.reset()

    def lengths(self, batch: Any) -> list[int]:
        """Committed lengths as far as the host has heard, up to a round behind."""
        return [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]

    def run(
        self,
        batch: Any,
        keys: list[RequestKey],
        plan: RoundPlan,
        adjustment: Adjustment | None = None,
        *,
        total: int | None = None,
    ) -> RoundOutcome:
        """Run a round of `batch` (SGLang's ScheduleBatch).

        Args:
            total: verify so many drafts of each request, those that were not made looked up in its context.
        """
        if batch.seq_lens.is_cuda:
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        pools = batch.req_pool_indices.long()
        # SGLang's relay is the authority on committed lengths: it also knows what a retraction took back.
        self.state.committed[pools] = batch.seq_lens.long()
        rows = SamplingRows.from_batch(batch.sampling_info, seeds_of(batch))
        # Plain decoding makes no selections: the drafts that follow it use the last one and what came since.
        scored = plan.drafts > 0 and self._count % self.config.score_every == 0
        self._count += plan.drafts > 0
        # The graphs draft and accept by themselves what is greedy and as the model says.
        inside = rows.all_greedy and adjustment is None
        self.rounds.upload(plan, keys, greedy=inside)
        before = self.graphs.eager_micro_steps
        kept = VerifiedLogits(len(keys), self.config.stride + 1, wanted=batch.return_logprob)
        for at, step in enumerate(plan.micro_steps):
            if not step.drafts and not step.verifies:
                # All that run have k drafts from unified rounds; the device's counter goes on all the same.
                self.rounds.header[0] += 1
                continue
            with self._timer.phase(_kind(step, plan)):
                if total and step.verifies:
                    self.rounds.look_up(pools, plan.drafts, total, sampled=not inside)
                device_step, logits = self.graphs.run(step, scored=scored, width=(total or 0) + 1)
            if not inside:
                self._settle(at, step, device_step, logits, rows, adjustment, kept)
            elif step.verifies and batch.return_logprob:
                kept.add(self._rows_of(at, 1, step)[2], _verified(device_step, step, logits))
        count = len(keys)
        out, made = self.rounds.out_tokens[:count], self.rounds.out_lens[:count]
        if self.rounds.history is not None:
            self.rounds.remember(pools, batch.seq_lens.long() + 1, out, made)
        return RoundOutcome(
            tokens=out.clone(),
            lengths=made.clone(),
            committed=self.state.committed[pools],
            bonus=self.state.tokens[pools, 0],
            graphs=self.graphs.eager_micro_steps == before,
            logits=kept.logits,
        )

    def _rows_of(self, at: int, kind: int, step: MicroStep) -> tuple[torch.Tensor, ...]:
        """Pools, drafts made, requests: of a micro-step's drafts (kind 0) or verifications (1), [n] int64."""
        count = len(step.verifies if kind else step.drafts)
        return self.rounds.table[at, kind, :count].long().unbind(dim=1)

    def _settle(
        self,
        at: int,
        step: MicroStep,
        device_step: DeviceStep,
        logits: torch.Tensor,
        rows: SamplingRows,
        adjustment: Adjustment | None,
        kept: VerifiedLogits,
    ) -> None:
        """Drafts and acceptance of a batch in which some request samples or has its logits adjusted."""
        if step.drafts:
            pools, drafted, requests = self._rows_of(at, 0, step)
            store_drafts(
                self.state,
                logits[: len(step.drafts)],
                rows.take(requests),
                pools=pools,
                drafted=drafted,
                positions=self.state.committed[pools] + drafted,
                config=self.config,
                generator=self._generator,
                requests=requests,
                adjustment=adjustment,
            )
        if step.verifies:
            pools, drafted, requests = self._rows_of(at, 1, step)
            width = device_step.buffers.queries
            accepted = accept_verified(
                self.state,
                _verified(device_step, step, logits),
                rows.take(requests),
                pools=pools,
                drafted=drafted,
                positions=self.state.committed[pools],
                generator=self._generator,
                requests=requests,
                adjustment=adjustment,
                kept=kept,
            )
            self.rounds.out_tokens[requests, :width] = accepted.tokens
            self.rounds.out_lens[requests] = accepted.lengths
            self.state.committed[pools] += accepted.lengths
