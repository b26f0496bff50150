"""Rounds whose micro-steps are laid out by the host from exact lengths: any device, no CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.batch import MicroStepBatch, RoundInputs, build_micro_step
from sglang_sparsespec.rounds.outcome import RoundOutcome, VerifiedLogits
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlan
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.sampling.adjust import Adjustment
from sglang_sparsespec.sampling.filters import SamplingRows
from sglang_sparsespec.sampling.seeds import seeds_of
from sglang_sparsespec.sampling.tail import accept_verified, store_drafts


class EagerRounds:
    """Runs rounds on a host-planned attention.

    Args:
        forward: runs the model over a micro-step; returns the logits of its tokens, [T, V].
    """

    def __init__(
        self,
        config: SparseSpecConfig,
        state: RequestState,
        req_to_token: torch.Tensor,
        forward: Callable[[MicroStepBatch], torch.Tensor],
        generator: torch.Generator,
    ) -> None:
        self.config, self.state = config, state
        self.eager_micro_steps = 0
        self._req_to_token = req_to_token
        self._forward = forward
        self._generator = generator
        self._seeded: dict[int, int] = {}  # pool row -> generation whose prefill seeded a selection
        self._base: dict[int, int] = {}  # pool row -> prefix that its selection was made from
        self._rounds = 0

    def capture(self) -> None:
        """There is nothing to capture."""

    def prefilled(self, batch: Any, keys: list[RequestKey], seeded_rows: list[int]) -> None:
        """A prefill ran; its last queries seeded the selections of `seeded_rows`."""
        lengths = batch.seq_lens_cpu.tolist()
        for row in seeded_rows:
            self._seeded[keys[row].pool] = keys[row].generation
            self._base[keys[row].pool] = lengths[row]

    def forget(self) -> None:
        """The KV cache was flushed."""
        self._seeded.clear()
        self._base.clear()
        self.state.zero()

    def lengths(self, batch: Any) -> list[int]:
        """Committed lengths that the host knows."""
        return batch.seq_lens_cpu.tolist()

    def run(
        self,
        batch: Any,
        keys: list[RequestKey],
        plan: RoundPlan,
        adjustment: Adjustment | None = None,
        *,
        total: int | None = None,
    ) -> RoundOutcome:
        """Run a round of `batch` (SGLang's ScheduleBatch). total: None; nothing is looked up here."""
        if batch.seq_lens.is_cuda:
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        committed_cpu = batch.seq_lens_cpu.tolist()
        self._reset_unseeded(keys, batch.req_pool_indices.long(), batch.seq_lens.long(), committed_cpu)
        inputs = RoundInputs(
            pools=batch.req_pool_indices.long(),
            committed=batch.seq_lens.long().clone(),
            committed_cpu=committed_cpu,
            base_cpu=[self._base[key.pool] for key in keys],
            scored=self._rounds % self.config.score_every == 0,
        )
        self._rounds += 1
        rows = SamplingRows.from_batch(batch.sampling_info, seeds_of(batch))
        device = inputs.pools.device
        tokens = torch.zeros((len(keys), self.config.stride + 1), dtype=torch.int64, device=device)
        lengths = torch.zeros(len(keys), dtype=torch.int64, device=device)
        verified: set[int] = set()
        kept = VerifiedLogits(len(keys), self.config.stride + 1, wanted=batch.return_logprob)
        for step in plan.micro_steps:
            micro = build_micro_step(step, inputs, self.state, self.config, self._req_to_token, verified)
            verified |= {row.row for row in step.verifies}
            logits = self._forward(micro)
            self.eager_micro_steps += 1
            if micro.drafts is not None:
                store_drafts(
                    self.state,
                    logits[: micro.draft_count],
                    rows.take(micro.draft_requests),
                    pools=micro.row_pools[: micro.draft_count],
                    drafted=micro.draft_at,
                    positions=micro.positions[: micro.draft_count],
                    config=self.config,
                    generator=self._generator,
                    requests=micro.draft_requests,
                    adjustment=adjustment,
                )
            if micro.verifies is not None:
                accepted = accept_verified(
                    self.state,
                    logits[micro.draft_count :][micro.verify_gather],
                    rows.take(micro.verify_requests),
                    pools=micro.row_pools[micro.draft_count :],
                    drafted=micro.verifies.queries - 1,
                    positions=inputs.committed[micro.verify_requests],
                    generator=self._generator,
                    requests=micro.verify_requests,
                    adjustment=adjustment,
                    kept=kept,
                )
                tokens[micro.verify_requests] = accepted.tokens
                lengths[micro.verify_requests] = accepted.lengths
                inputs.committed[micro.verify_requests] += accepted.lengths
        if inputs.scored:
            self._base.update((key.pool, length) for key, length in zip(keys, committed_cpu, strict=True))
        bonus = self.state.tokens[inputs.pools, 0]
        return RoundOutcome(tokens, lengths, inputs.committed, bonus, graphs=False, logits=kept.logits)

    def _reset_unseeded(
        self, keys: list[RequestKey], pools: torch.Tensor, committed: torch.Tensor, committed_cpu: list[int]
    ) -> None:
        """A request whose prefill was not seen first drafts from the start of its context."""
        fresh = [row for row, key in enumerate(keys) if self._seeded.get(key.pool) != key.generation]
        if not fresh:
            return
        at = torch.tensor(fresh, device=pools.device)
        capacity = self.state.selected.shape[-1]
        self.state.selected[:, :, pools[at]] = torch.arange(capacity, dtype=torch.int32, device=pools.device)
        kept = [min(self.config.budget(committed_cpu[row]), capacity) for row in fresh]
        self.state.selected_len[pools[at]] = torch.tensor(kept, device=pools.device)
        self.state.selected_base[pools[at]] = committed[at]
        for row in fresh:
            self._seeded[keys[row].pool] = keys[row].generation
            self._base[keys[row].pool] = committed_cpu[row]
