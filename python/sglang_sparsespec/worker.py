"""The speculative worker in SGLang's scheduler process: runs prefills and rounds, nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_sparsespec import compat
from sglang_sparsespec.attention import make_attention, query_heads
from sglang_sparsespec.attention.backend import SparseSpecAttentionBackend
from sglang_sparsespec.attention.layers import AttentionLayers
from sglang_sparsespec.attention.paged import PagedAttention
from sglang_sparsespec.config import ConfigError, SparseSpecConfig, resolve_config
from sglang_sparsespec.draft_weights import DraftWeights
from sglang_sparsespec.memory.report import MemoryReport, device_memory, size_of
from sglang_sparsespec.metrics import AcceptanceMetrics, PhaseTimer, seconds_of
from sglang_sparsespec.refusals import unsupported_layer
from sglang_sparsespec.rounds.batch import MicroStepBatch
from sglang_sparsespec.rounds.costs import ATTENTION_SHARE, Load, StepCosts
from sglang_sparsespec.rounds.eager import EagerRounds
from sglang_sparsespec.rounds.learning import ROUND, CostLearner, Timed
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlan, RoundPlanner, kv_reserve
from sglang_sparsespec.rounds.policy import AdaptivePolicy, FixedPolicy, RoundPolicy
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.sampling.adjust import OutputCounts
from sglang_sparsespec.sampling.seeds import prefilling, seeds_of
from sglang_sparsespec.selection import make_selector
from sglang_sparsespec.spec_input import SparseDraftInput, SparseVerifyInput
from sglang_sparsespec.version import __version__

if TYPE_CHECKING:
    from sgl_kernel_ext.buffers import MicroStepBuffers

    from sglang_sparsespec.rounds.device import DeviceRounds, DeviceStep
    from sglang_sparsespec.rounds.graphs import GraphKey
    from sglang_sparsespec.rounds.replayed import ReplayedRounds

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
        # Rounds that adapt learn from what they time.
        self.timer = PhaseTimer(self.device, sample=8 if self.config.may_adapt else 64)
        # Every tensor-parallel rank draws the same numbers: same seed, same calls in the same order.
        self._seed = int(server_args.random_seed or 0)
        self.counts = OutputCounts(self.model_runner.model_config.vocab_size, self.device)
        self._generator = torch.Generator(device=self.device).manual_seed(self._seed)
        self.graph_batch_sizes: list[int] = []
        self.graph_bytes = 0
        self.memory: MemoryReport | None = None  # once all is there
        self.policy: RoundPolicy = FixedPolicy(self.config.stride)
        self.learner: CostLearner | None = None  # where rounds adapt
        self.device_planned = False  # whether the attention takes lengths from the device
        # Before the KV pool is sized, so that it leaves them their memory.
        self.draft_weights = self._make_draft_weights()

    def _make_draft_weights(self) -> DraftWeights | None:
        if self.config.draft_weights == "model":
            return None
        weights = DraftWeights(self.model_runner.model, self.config.draft_weights)
        logger.info(
            "SPARSESPEC drafts on %s copies of %d linear layers, %.2f GiB",
            weights.kind,
            len(weights),
            weights.nbytes / 2**30,
        )
        return weights

    def _weights_for(self, *, drafts: int, verifies: int) -> contextlib.AbstractContextManager[None]:
        """The weights that a micro-step of so many rows reads."""
        if self.draft_weights is None or verifies:
            return contextlib.nullcontext()
        return self.draft_weights.active(rows=drafts)

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
            layers=self.config.selection_groups(len(self.layers.full)),
            heads=1 if self.config.index_scope == "layer" else kv_pool.head_num,
            max_selected=self.config.budget(context),
            device=self.device,
        )

    def _check_layers(self) -> None:
        layers = {
            name: layer
            for name, layer in self.model_runner.model.named_modules()
            if isinstance(layer, RadixAttention)
        }
        for name, layer in layers.items():
            if reason := unsupported_layer(layer):
                raise ValueError(f"SPARSESPEC does not support this model: layer {name} {reason}.")
        shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim) for layer in layers.values()}
        if len(shapes) > 1 or len({layer.layer_id for layer in layers.values()}) < len(layers):
            raise ValueError(
                "SPARSESPEC does not support this model: its attention layers differ in heads or head "
                "dimension, or share KV. Start without --speculative-algorithm SPARSESPEC."
            )
        self.layers = AttentionLayers.of(layers.values())
        if not self.layers.full:
            raise ValueError(
                "SPARSESPEC does not support this model: all its attention layers have sliding windows, so "
                "that there is nothing to choose from. Start without --speculative-algorithm SPARSESPEC."
            )

    def _check_reserve(self) -> None:
        needed = kv_reserve(self.config.stride, self.config.schedule)
        reserve = get_alloc_reserve_per_decode()
        if reserve < needed:
            raise RuntimeError(f"SGLang reserves {reserve} KV slots a round; SPARSESPEC needs {needed}.")

    def init_attention_backends(self) -> None:
        runner = self.model_runner
        req_to_token = runner.req_to_token_pool.req_to_token
        plain = not self.layers.windows and not compat.has_sinks(runner.model_config)
        attention = make_attention(self.config, runner, req_to_token, plain=plain)
        self.attention_name = attention.name
        self.device_planned = isinstance(attention, PagedAttention)
        device_rounds = self._device_rounds(attention) if isinstance(attention, PagedAttention) else None
        runner.attn_backend = SparseSpecAttentionBackend(
            inner=runner.attn_backend,
            attention=None if isinstance(attention, PagedAttention) else attention,
            selector=make_selector(self.config, seed=self._seed),
            state=self.state,
            config=self.config,
            req_to_token=req_to_token,
            kv_pool=runner.token_to_kv_pool,
            timer=self.timer,
            layers=self.layers,
            rounds=device_rounds,
        )
        self._watched = compat.watched_by_canary(runner)
        self.rounds = self._make_rounds(device_rounds, req_to_token)
        self.state_bytes = self.state.nbytes + (device_rounds.nbytes if device_rounds else 0)
        logger.info(
            "SPARSESPEC %s runs: attention %s, selection state and scratch %.1f MiB",
            __version__,
            self.attention_name,
            self.state_bytes / 2**20,
        )

    def _device_rounds(self, attention: PagedAttention) -> DeviceRounds:
        # Only here: the kernels are a package of their own, which the other paths do without.
        from sgl_kernel_ext.buffers import SCORE_ALIGN

        from sglang_sparsespec.rounds.device import DeviceRounds
        from sglang_sparsespec.rounds.kernels import load_kernels

        pool = self.model_runner.token_to_kv_pool
        return DeviceRounds(
            config=self.config,
            state=self.state,
            kernels=load_kernels(str(self.device)),
            attention=attention,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            slots=self.state.tokens.shape[0] - 1,
            layers=len(self.layers.full),
            windows=self.layers.sizes,
            heads=query_heads(self.model_runner.model),
            # Rows that share a prefix count it each; what does not fit keeps its last selection.
            score_capacity=-(-pool.size // 64) * 64 + SCORE_ALIGN * self.state.tokens.shape[0],
        )

    def _make_rounds(
        self, device_rounds: DeviceRounds | None, req_to_token: torch.Tensor
    ) -> EagerRounds | ReplayedRounds:
        if device_rounds is None:
            if self.config.adapt == "on" or self.config.lookup == "on":
                key, instead = "adapt", "adapt 'auto' or 'off'"
                if self.config.adapt != "on":
                    key, instead = "lookup", "lookup 'off'"
                raise ConfigError(
                    f"SPARSESPEC: {key} is 'on', but attention {self.attention_name!r} plans its rounds on "
                    "the host, where all have k drafts. Use attention 'fused', 'fa3', 'triton' or "
                    f"'torch_paged', or {instead}."
                )
            return EagerRounds(self.config, self.state, req_to_token, self._forward_eager, self._generator)
        from sglang_sparsespec.rounds.replayed import ReplayedRounds

        sizes = {min(size, device_rounds.slots) for size in compat.graph_batch_sizes()}
        graphs = bool(sizes) and device_rounds.header.is_cuda
        keys, self.graph_batch_sizes = self._plan_keys(sorted(sizes) if graphs else [])
        return ReplayedRounds(
            self.config,
            device_rounds,
            self._forward_device,
            self._generator,
            self.timer,
            keys=keys,
            around=self._canary_step if self._watched else None,
        )

    def _canary_step(self, step: DeviceStep) -> contextlib.AbstractContextManager[None]:
        buffers = step.buffers
        return compat.canary_step(self.model_runner, buffers.nd + buffers.nv, buffers.positions)

    @property
    def adapts(self) -> bool:
        """Whether rounds choose how many drafts they make."""
        return self.config.may_adapt and self.device_planned

    def _plan_keys(self, sizes: list[int]) -> tuple[list[GraphKey], list[int]]:
        from sglang_sparsespec.rounds.graphs import plan_keys

        return plan_keys(
            sizes,
            stride=self.config.stride,
            schedule=self.config.schedule,
            score_every=self.config.score_every,
            adapt=self.adapts,
        )

    def init_cuda_graphs(self) -> None:
        """Capture the micro-steps; the target itself has captured none. Time them where rounds adapt."""
        before, _ = device_memory(self.device)
        with compat.canary_at_rest(self.model_runner):
            self._capture_and_time()
        after, _ = device_memory(self.device)
        if before is not None and after is not None:
            self.graph_bytes = max(0, before - after)

    def report_memory(self, host_tier: tuple[int, int]) -> None:
        """Tell where the memory went. host_tier: bytes and tokens of KV in host memory."""
        pool, model = self.model_runner.token_to_kv_pool, self.model_runner.model
        free, total = device_memory(self.device)
        self.memory = MemoryReport(
            weights=size_of([*model.parameters(), *model.buffers()]),
            draft_weights=self.draft_weights.nbytes if self.draft_weights else 0,
            # SGLang has some of these from numpy, whose numbers do not go into JSON.
            kv_pool=int(sum(pool.get_kv_size_bytes())),
            kv_tokens=int(pool.size),
            page_tables=self.req_to_token_pool.req_to_token.nbytes,
            selection=self.state_bytes,
            graphs=self.graph_bytes,
            host_tier=host_tier[0],
            host_tokens=host_tier[1],
            free=free,
            total=total,
        )
        logger.info("%s", self.memory)

    def _capture_and_time(self) -> None:
        self.rounds.capture()
        if self.adapts and not isinstance(self.rounds, EagerRounds):
            slots = self.rounds.rounds.slots
            times = self.rounds.graphs.measure(self._plan_keys([1, slots])[0])
            costs = StepCosts(*compat.same_on_all_ranks((times, self._key_us())))
            self.policy = AdaptivePolicy(self.config.stride, costs, lookup=self.config.lookup == "on")
            share = compat.same_on_all_ranks if get_parallel().tp_size > 1 else None
            self.learner = CostLearner(costs, share)
            self.timer.listener = self.learner.heard
            logger.info(
                "SPARSESPEC adapts its drafts: a draft of one request takes %.0f us, a plain step %.0f us",
                costs.draft_us(1, 0),
                costs.verify_us(1, 0, 0),
            )

    def _key_us(self) -> float:
        """Microseconds to read a key and a value of all layers but those with windows, from a copy of part of
        the KV pool."""
        pool = self.model_runner.token_to_kv_pool
        keys = pool.get_key_buffer(pool.start_layer)
        keys = keys[: max(2, (256 << 20) // keys[0].nbytes)]
        into = torch.empty_like(keys)

        def seconds(count: int) -> float:
            work = partial(into[:count].copy_, keys[:count])
            return min(seconds_of(work, self.device) for _ in range(8))

        # The difference of two copies: a launch and the wait for its end are in both.
        some = len(keys) // 4
        taken = max(seconds(len(keys)) - seconds(some), 1e-9) / (len(keys) - some)
        # A copied key is read and written, which moves as much as reading a key and its value.
        return len(self.layers.full) * taken * 1e6 / ATTENTION_SHARE

    def describe(self) -> dict[str, Any]:
        """What `/server_info` shows under `sparsespec`."""
        return {
            "version": __version__,
            "config": self.config.asdict(),
            "attention": self.attention_name,
            "selection_state_bytes": self.state_bytes,
            "memory": self.memory.asdict() if self.memory else {},
            "draft_weights_bytes": self.draft_weights.nbytes if self.draft_weights else 0,
            "select_time_us_per_layer": round(self.timer.mean_us("select"), 2),
            "draft_micro_step_us": round(self.timer.mean_us("draft"), 1),
            "verify_micro_step_us": round(self.timer.mean_us("verify"), 1),
            "plain_step_us": round(self.timer.mean_us("plain"), 1),
            "mixed_micro_step_us": round(self.timer.mean_us("mixed"), 1),
            "round_us": round(self.timer.mean_us(ROUND), 1),
            "costs": self.learner.costs.describe() if self.learner else {},
            "adapts": self.adapts,
            "eager_micro_steps": self.rounds.eager_micro_steps,
            "cuda_graph_batch_sizes": self.graph_batch_sizes,
            **self.metrics.snapshot(),
        }

    # -- what the scheduler tells -------------------------------------

    def clear_cache_pool(self) -> None:
        self.planner.forget()
        self.rounds.forget()
        self.refresh_draft_weights()

    def refresh_draft_weights(self) -> None:
        """Make anew what drafts read of layers whose weights were changed. A round may be running."""
        if self.draft_weights is not None and (changed := self.draft_weights.refresh()):
            logger.info("SPARSESPEC quantised %d layers anew, whose weights were changed", changed)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        launched = self.metrics.finished(num_correct_drafts_per_req)
        if launched is not None:
            drafted, total = launched
            self.policy.observe(drafted, num_correct_drafts_per_req, total)

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
        self.timer.break_laps()
        with prefilling(seeds_of(batch)):
            result = self._target_worker.forward_batch_generation(batch)
        tokens = result.next_token_ids.reshape(-1)
        self.state.begin(batch.req_pool_indices.long(), tokens)
        keys = self._keys(batch)
        self.counts.begin(batch.reqs, [key.pool for key in keys], tokens)
        backend = self.model_runner.attn_backend
        backend.finish_prefill()
        self.rounds.prefilled(batch, keys, backend.seeded_rows)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = SparseDraftInput(bonus_tokens=tokens, new_seq_lens=batch.seq_lens)
        return result

    def _keys(self, batch: Any) -> list[RequestKey]:
        generation = self.req_to_token_pool.req_generation
        # Not the requests' own: one that finished in the round before may have given its row back already.
        pools = batch.req_pool_indices_cpu.tolist()
        return [RequestKey(pool, int(generation[pool])) for pool in pools]

    def _round(self, batch: Any) -> GenerationBatchResult:
        keys = self._keys(batch)
        lengths = self.rounds.lengths(batch)
        budgets = self.config.budgets(lengths)
        load = Load.of(lengths, budgets)
        if self.learner is not None:
            self.learner.next_round()
        choice = self.policy.choose(load)
        plan = self.planner.plan_round(keys, choice.drafts, unified=choice.unified)
        self.metrics.chose(choice.drafts, choice.reason, unified=plan.unified)
        # What unified rounds left half drafted is verified as it is.
        total = None if plan.unified else choice.total
        self._note_launch(plan, budgets, total)
        self.timer.collect()
        unified = plan.unified if choice.unified is None else choice.unified
        self.timer.note = Timed(load, choice.drafts, unified, total)
        adjustment = self.counts.adjustment(batch, [key.pool for key in keys])
        outcome = self.rounds.run(batch, keys, plan, adjustment, total=total)
        self.timer.lap(ROUND)
        self.metrics.eager(self.rounds.eager_micro_steps)
        logits = None
        if outcome.logits is not None:
            logits = compat.verified_logprobs(batch, outcome.logits, outcome.tokens)
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=outcome.tokens.reshape(-1),
            accept_lens=outcome.lengths,
            speculative_num_draft_tokens=self.config.stride + 1,
            new_seq_lens=outcome.committed,
            next_draft_input=SparseDraftInput(bonus_tokens=outcome.bonus, new_seq_lens=outcome.committed),
            can_run_cuda_graph=outcome.graphs,
        )

    def _note_launch(self, plan: RoundPlan, budgets: list[int], total: int | None) -> None:
        drafted = [0] * len(budgets)
        for step in plan.micro_steps:
            for row in step.verifies:
                drafted[row.row] = row.drafted
        self.metrics.launched(drafted, budgets, total)

    def _forward_eager(self, micro: MicroStepBatch) -> torch.Tensor:
        """Logits of a host-planned micro-step's tokens, [T, V]."""
        forward_batch = self._forward_batch(
            micro,
            input_ids=micro.input_ids,
            positions=micro.positions,
            out_cache_loc=micro.out_cache_loc,
            row_pools=micro.row_pools,
            row_prefix=micro.row_prefix,
        )
        if self._watched:
            queries = micro.verifies.queries if micro.verifies is not None else micro.row_pools[:0]
            forward_batch.spec_info.written = compat.written_rows(
                pools=micro.row_pools,
                prefix=micro.row_prefix,
                lengths=torch.cat([torch.ones_like(micro.row_pools[: micro.draft_count]), queries]),
                input_ids=micro.input_ids,
                positions=micro.positions,
                out_cache_loc=micro.out_cache_loc,
            )
        with self._weights_for(drafts=micro.draft_count, verifies=len(micro.verify_requests)):
            result = self._target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        return result.logits_output.next_token_logits

    def _forward_device(self, step: DeviceStep) -> torch.Tensor:
        """Logits of a micro-step whose lengths live on the device, [T, V]. May run under graph capture."""
        buffers = step.buffers
        rows = torch.zeros(buffers.nd + buffers.nv, dtype=torch.int64, device=self.device)
        forward_batch = self._forward_batch(
            None,
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            out_cache_loc=buffers.out_cache_loc,
            row_pools=rows,
            row_prefix=rows,
        )
        if self._watched:
            forward_batch.spec_info.written = _written(buffers)
        backend = self.model_runner.attn_backend
        backend.bind(step)
        try:
            with self._weights_for(drafts=buffers.nd, verifies=buffers.nv):
                return compat.model_logits(self.model_runner, forward_batch)
        finally:
            backend.bind(None)

    def _forward_batch(
        self,
        micro: MicroStepBatch | None,
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        row_pools: torch.Tensor,
        row_prefix: torch.Tensor,
    ) -> ForwardBatch:
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(row_pools),
            input_ids=input_ids,
            req_pool_indices=row_pools,
            seq_lens=row_prefix,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            positions=positions,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=SparseVerifyInput(
                positions=positions, micro_step=micro, draft_token_num=self.config.stride + 1
            ),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        self.model_runner.kv_index_translator.bind_own_plan(forward_batch)
        return forward_batch


def _written(buffers: MicroStepBuffers) -> Any:
    """What a micro-step of static slots writes, for SGLang's KV canary, worked out on the device."""
    drafts = buffers.positions[: buffers.nd].where(buffers.draft_len > 0, 0)
    return compat.written_rows(
        # The canary lets rows of pool 0 count for no tokens, but here empty slots have tokens too: they stand
        # for any other request, and write to the dummy slot.
        pools=torch.cat([buffers.draft_pool, buffers.verify_pool]).long().clamp(min=1),
        prefix=torch.cat([drafts, buffers.first.long()]),
        lengths=torch.cat([torch.ones_like(drafts), torch.full_like(buffers.first, buffers.queries).long()]),
        input_ids=buffers.input_ids,
        positions=buffers.positions,
        out_cache_loc=buffers.out_cache_loc,
    )
