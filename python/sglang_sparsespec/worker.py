"""The speculative worker in SGLang's scheduler process: runs prefills and rounds, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_sparsespec.attention import make_attention
from sglang_sparsespec.attention.backend import SparseSpecAttentionBackend
from sglang_sparsespec.config import SparseSpecConfig, resolve_config
from sglang_sparsespec.metrics import AcceptanceMetrics, PhaseTimer
from sglang_sparsespec.refusals import unsupported_layer
from sglang_sparsespec.rounds.batch import MicroStepBatch, RoundInputs, build_micro_step
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlan, RoundPlanner, kv_reserve
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.sampling.accept import accept_drafts, draft_tokens
from sglang_sparsespec.sampling.filters import SamplingRows
from sglang_sparsespec.selection import make_selector
from sglang_sparsespec.spec_input import SparseDraftInput, SparseVerifyInput
from sglang_sparsespec.version import __version__

logger = logging.getLogger(__name__)


class SparseSpecWorker(BaseSpecWorker):
    """Drafts and verifies with the target model itself. The scheduler drives it as any Spec-V2 worker."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.server_args = server_args
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        spec = get_spec()
        self.config: SparseSpecConfig = resolve_config(
            num_steps=spec.speculative_num_steps, num_draft_tokens=spec.speculative_num_draft_tokens
        )
        # Read by SGLang's metrics.
        self.speculative_num_steps = self.config.stride
        self.speculative_num_draft_tokens = self.config.stride + 1
        self.planner = RoundPlanner(self.config.stride, self.config.schedule)
        self.metrics = AcceptanceMetrics(self.config.stride)
        if server_args.enable_metrics and get_parallel().tp_rank == 0:
            name = server_args.served_model_name or server_args.model_path
            self.metrics.enable_prometheus({"model_name": name})
        self.timer = PhaseTimer(self.device)
        # Every tensor-parallel rank draws the same numbers: same seed, same calls in the same order.
        self._seed = int(server_args.random_seed or 0)
        self._generator = torch.Generator(device=self.device).manual_seed(self._seed)
        self._seeded: dict[int, int] = {}  # pool row -> generation whose prefill seeded a selection
        self._base: dict[int, int] = {}  # pool row -> prefix that its selection was made from

    # -- start-up, in the order in which the scheduler calls -------------------------------------

    @property
    def draft_worker(self) -> None:
        """None: there is one model and one KV pool."""
        return None

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._check_layers()
        self._check_reserve()
        kv_pool = self.model_runner.token_to_kv_pool
        context = int(self.model_runner.model_config.context_len)
        self.state = RequestState(
            rows=req_to_token_pool.req_to_token.shape[0],
            stride=self.config.stride,
            support=min(self.config.draft_support, self.model_runner.model_config.vocab_size),
            layers=kv_pool.layer_num,
            heads=1 if self.config.index_scope == "layer" else kv_pool.head_num,
            max_selected=self.config.budget(context),
            device=self.device,
        )

    def _check_layers(self) -> None:
        for name, layer in self.model_runner.model.named_modules():
            reason = unsupported_layer(layer) if isinstance(layer, RadixAttention) else None
            if reason:
                raise ValueError(f"SPARSESPEC does not support this model: layer {name} {reason}.")

    def _check_reserve(self) -> None:
        needed = kv_reserve(self.config.stride, self.config.schedule)
        reserve = get_alloc_reserve_per_decode()
        if reserve < needed:
            raise RuntimeError(f"SGLang reserves {reserve} KV slots a round; SPARSESPEC needs {needed}.")

    def init_attention_backends(self) -> None:
        runner = self.model_runner
        req_to_token = runner.req_to_token_pool.req_to_token
        self.attention = make_attention(self.config, runner, req_to_token)
        runner.attn_backend = SparseSpecAttentionBackend(
            inner=runner.attn_backend,
            attention=self.attention,
            selector=make_selector(self.config, seed=self._seed),
            state=self.state,
            config=self.config,
            req_to_token=req_to_token,
            kv_pool=runner.token_to_kv_pool,
            timer=self.timer,
        )
        logger.info(
            "SPARSESPEC %s runs: attention %s, selection state %.1f MiB",
            __version__,
            self.attention.name,
            self.state.nbytes / 2**20,
        )

    def describe(self) -> dict[str, Any]:
        """What `/server_info` shows under `sparsespec`."""
        return {
            "version": __version__,
            "config": self.config.asdict(),
            "attention": self.attention.name,
            "selection_state_bytes": self.state.nbytes,
            "select_time_us_per_layer": round(self.timer.mean_us("select"), 2),
            **self.metrics.snapshot(),
        }

    # -- what the scheduler tells -------------------------------------

    def clear_cache_pool(self) -> None:
        self.planner.forget()
        self._seeded.clear()
        self._base.clear()
        self.state.zero()

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self.metrics.finished(num_correct_drafts_per_req)

    def __getattr__(self, name: str) -> Any:
        # All else that the scheduler asks of a worker is the target's to answer.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # -- forwards -------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """Run a prefill or a round. Publishes the new committed lengths once, on the forward stream."""
        if batch.forward_mode.is_extend():
            result = self._prefill(batch)
        elif batch.forward_mode.is_decode():
            result = self._round(batch)
        else:
            raise RuntimeError(f"SPARSESPEC got a batch of mode {batch.forward_mode}.")
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(batch)
        tokens = result.next_token_ids.reshape(-1)
        self.state.begin(batch.req_pool_indices.long(), tokens)
        keys, lengths = self._keys(batch), batch.seq_lens_cpu.tolist()
        for row in self.model_runner.attn_backend.seeded_rows:
            self._seeded[keys[row].pool] = keys[row].generation
            self._base[keys[row].pool] = lengths[row]
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = SparseDraftInput(bonus_tokens=tokens, new_seq_lens=batch.seq_lens)
        return result

    def _keys(self, batch: Any) -> list[RequestKey]:
        generation = self.req_to_token_pool.req_generation
        pools = [int(req.kv.req_pool_idx) for req in batch.reqs]
        return [RequestKey(pool, int(generation[pool])) for pool in pools]

    def _round(self, batch: Any) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        keys = self._keys(batch)
        committed_cpu = batch.seq_lens_cpu.tolist()
        self._reset_unseeded(keys, batch.req_pool_indices.long(), batch.seq_lens.long(), committed_cpu)
        inputs = RoundInputs(
            pools=batch.req_pool_indices.long(),
            committed=batch.seq_lens.long().clone(),
            committed_cpu=committed_cpu,
            base_cpu=[self._base[key.pool] for key in keys],
        )
        plan = self.planner.plan_round(keys)
        self._note_launch(plan, inputs)

        rows = SamplingRows.from_batch(batch.sampling_info)
        # Fresh tensors: the scheduler copies them to the host on another stream while the next round runs.
        tokens = torch.zeros((len(keys), self.config.stride + 1), dtype=torch.int64, device=self.device)
        lengths = torch.zeros(len(keys), dtype=torch.int64, device=self.device)
        verified: set[int] = set()
        for step in plan.micro_steps:
            micro = build_micro_step(
                step, inputs, self.state, self.config, self.req_to_token_pool.req_to_token, verified
            )
            verified |= {row.row for row in step.verifies}
            logits = self._forward(micro)
            if micro.drafts is not None:
                self._draft(micro, logits[: micro.draft_count], rows)
            if micro.verifies is not None:
                self._accept(micro, logits[micro.draft_count :], rows, inputs, tokens, lengths)
        self._base.update((key.pool, length) for key, length in zip(keys, committed_cpu, strict=True))
        return GenerationBatchResult(
            next_token_ids=tokens.reshape(-1),
            accept_lens=lengths,
            speculative_num_draft_tokens=self.config.stride + 1,
            new_seq_lens=inputs.committed,
            next_draft_input=SparseDraftInput(
                bonus_tokens=self.state.tokens[inputs.pools, 0], new_seq_lens=inputs.committed
            ),
            can_run_cuda_graph=False,
        )

    def _reset_unseeded(
        self, keys: list[RequestKey], pools: torch.Tensor, committed: torch.Tensor, committed_cpu: list[int]
    ) -> None:
        """A request whose prefill this worker did not see first drafts from the start of its context."""
        fresh = [row for row, key in enumerate(keys) if self._seeded.get(key.pool) != key.generation]
        if not fresh:
            return
        at = torch.tensor(fresh, device=self.device)
        capacity = self.state.selected.shape[-1]
        self.state.selected[:, :, pools[at]] = torch.arange(capacity, dtype=torch.int32, device=self.device)
        kept = [min(self.config.budget(committed_cpu[row]), capacity) for row in fresh]
        self.state.selected_len[pools[at]] = torch.tensor(kept, device=self.device)
        self.state.selected_base[pools[at]] = committed[at]
        for row in fresh:
            self._seeded[keys[row].pool] = keys[row].generation
            self._base[keys[row].pool] = committed_cpu[row]

    def _note_launch(self, plan: RoundPlan, inputs: RoundInputs) -> None:
        drafted = [0] * len(inputs.committed_cpu)
        for step in plan.micro_steps:
            for row in step.verifies:
                drafted[row.row] = row.drafted
        self.metrics.launched(drafted, [self.config.budget(n) for n in inputs.committed_cpu])

    def _forward(self, micro: MicroStepBatch) -> torch.Tensor:
        """Logits of a micro-step's tokens, [T, V]."""
        spec_info = SparseVerifyInput(micro_step=micro, draft_token_num=self.config.stride + 1)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(micro.row_pools),
            input_ids=micro.input_ids,
            req_pool_indices=micro.row_pools,
            seq_lens=micro.row_prefix,
            out_cache_loc=micro.out_cache_loc,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=micro.positions,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        self.model_runner.kv_index_translator.bind_own_plan(forward_batch)
        result = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        return result.logits_output.next_token_logits

    def _draft(self, micro: MicroStepBatch, logits: torch.Tensor, rows: SamplingRows) -> None:
        drafts = draft_tokens(
            logits,
            rows.take(micro.draft_requests),
            support=self.config.draft_support,
            generator=self._generator,
            wrong=self.config.debug_drafts == "wrong",
        )
        pools = micro.row_pools[: micro.draft_count]
        self.state.tokens[pools, micro.draft_at + 1] = drafts.tokens
        if drafts.support_ids is not None and drafts.support_probs is not None:
            self.state.support_ids[pools, micro.draft_at] = drafts.support_ids
            self.state.support_probs[pools, micro.draft_at] = drafts.support_probs

    def _accept(
        self,
        micro: MicroStepBatch,
        logits: torch.Tensor,
        rows: SamplingRows,
        inputs: RoundInputs,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        pools = micro.row_pools[micro.draft_count :]
        if micro.verifies is None:
            raise RuntimeError("the micro-step verifies nothing.")
        accepted = accept_drafts(
            logits[micro.verify_gather],
            self.state.tokens[pools, 1:],
            micro.verifies.queries - 1,
            rows.take(micro.verify_requests),
            support_ids=self.state.support_ids[pools],
            support_probs=self.state.support_probs[pools],
            generator=self._generator,
        )
        self.state.tokens[pools, 0] = accepted.bonus
        tokens[micro.verify_requests] = accepted.tokens
        lengths[micro.verify_requests] = accepted.lengths
        inputs.committed[micro.verify_requests] += accepted.lengths
