"""The contract with SGLang: all that this package relies on beyond SGLang's documented seams, and its check.

`contract.json` beside this file holds signatures, fields and source fingerprints of the supported release;
`python -m sglang_sparsespec.compat --write` takes them anew. Everything private that the package touches is
reached through this module and `hooks.py`, or is listed in that file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import inspect
import json
import logging
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_sparsespec.config import ALLOW_UNTESTED_ENV
from sglang_sparsespec.version import SUPPORTED_SGLANG

CONTRACT_FILE = Path(__file__).with_name("contract.json")

logger = logging.getLogger(__name__)

SRT = "sglang.srt."
# Called by us, or calling us: a changed signature breaks at once.
SIGNATURES = (
    "managers.scheduler.Scheduler.validate_dllm_request",
    "managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
    "managers.overlap_utils.FutureMap.__init__",
    "managers.tp_worker.TpModelWorker.forward_batch_generation",
    "layers.sampler.Sampler._sample_from_probs",
    "managers.scheduler.Scheduler.is_disable_overlap_for_batch",
    "managers.scheduler.Scheduler.process_input_requests",
    "managers.scheduler.Scheduler.handle_generate_request",
    "managers.scheduler_components.logprob_result_processor.SchedulerLogprobResultProcessor.add_logprob_return_values",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update",
    "managers.scheduler.Scheduler.is_fully_idle",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation",
    "kv_canary.runner.canary_manager.CanaryManager.with_active_single_forward_manager",
    "kv_canary.runner.canary_manager.CanaryManager.with_ops_outside_graph",
    "kv_canary.runner.canary_manager.CanaryManager.mark_init_finished",
    "kv_canary.single_forward_manager.manager.SingleForwardManager.pre_ops_maybe_inside_graph",
    "kv_canary.single_forward_manager.manager.SingleForwardManager.post_ops_maybe_inside_graph",
    "managers.scheduler.Scheduler.update_running_batch",
    "managers.scheduler.Scheduler.process_batch_result",
    "managers.scheduler.Scheduler._add_request_to_queue",
    "managers.scheduler.Scheduler._release_aborted_request",
    "managers.scheduler.Scheduler._abort_on_queued_limit",
    "managers.scheduler.Scheduler.init_overlap",
    "managers.schedule_batch.ScheduleBatch.check_decode_mem",
    "managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
    "managers.schedule_batch.ScheduleBatch.release_req",
    "managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
    "managers.schedule_batch.Req.refresh_fill_ids",
    "managers.schedule_batch.Req.materialized_host_hit_len",
    "managers.schedule_policy.PrefillAdder.add_one_req",
    "managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
    "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
    "mem_cache.unified_radix_cache.UnifiedRadixCache.writing_check",
    "mem_cache.unified_radix_cache.UnifiedRadixCache._log_write_ack_metrics",
    "mem_cache.pool_host.common._cuda_host_register",
    "mem_cache.pool_host.mha.MHATokenToKVPoolHost.backup_from_device_all_layer",
    "mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
    "arg_groups.hicache_hook.handle_hicache",
    "arg_groups.resolution_hooks.register_resolution_hook",
    "mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
    "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    "mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan",
    "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
    "mem_cache.memory_pool.MHATokenToKVPool.get_key_buffer",
    "layers.attention.base_attn_backend.AttentionBackend.forward",
    "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
    "model_executor.cuda_graph_config.with_phase",
    "model_executor.forward_context.forward_context",
    "model_executor.forward_context.ForwardContext",
    "model_executor.runner_utils.capture_mode.model_capture_mode",
    "model_executor.runner_utils.pool.get_or_create_global_graph_memory_pool",
    "model_executor.runner_utils.pool.get_or_create_global_graph_capture_stream",
    "distributed.parallel_state.graph_capture",
    "distributed.device_communicators.pynccl_allocator.set_graph_pool_id",
    "speculative.base_spec_worker.BaseSpecWorker.alloc_memory_pool",
    "speculative.base_spec_worker.BaseSpecWorker.on_verify_complete_cpu",
    "speculative.spec_info.SpeculativeAlgorithm.register",
    "speculative.spec_info.SpeculativeAlgorithm.create_future_map",
    "speculative.spec_registry.CustomSpecAlgo.__init__",
    "layers.quantization.unquant.UnquantizedLinearMethod.apply",
    "layers.logits_processor.LogitsProcessor._compute_lm_head",
    "layers.logprob_processor.compute_spec_logprobs",
    "speculative.spec_utils.GrammarTree.from_linear_chain",
    "speculative.spec_utils.generate_token_bitmask",
    "layers.quantization.marlin_utils.marlin_permute_scales",
    "layers.quantization.marlin_utils.marlin_make_workspace",
    "plugins.hook_registry.HookRegistry.register",
    "plugins.hook_registry.HookRegistry.apply_hooks",
    "server_args.ServerArgs.add_cli_args",
)
# Read or filled by us.
FIELDS = {
    "managers.utils.GenerationBatchResult": (
        "next_token_ids accept_lens speculative_num_draft_tokens num_non_draft_tokens_per_req new_seq_lens "
        "next_draft_input can_run_cuda_graph logits_output"
    ),
    "managers.overlap_utils.RelayPayload": "bonus_tokens topk_p topk_index hidden_states dsa_topk_indices",
    "model_executor.forward_batch_info.ForwardBatch": (
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum seq_lens_cpu "
        "positions spec_algorithm spec_info capture_hidden_mode extend_seq_lens_cpu"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures top_ps top_ks min_ps is_all_greedy is_any_greedy need_top_p_sampling "
        "need_top_k_sampling need_min_p_sampling"
    ),
}
# Whose behaviour the design depends on: any change of their code wants a human's eye.
BEHAVIOUR = (
    "speculative.eagle_utils.eagle_prepare_for_decode",
    "speculative.spec_utils.spec_prepare_for_decode",
    "speculative.spec_registry.CustomSpecAlgo",
    "speculative.base_spec_worker.BaseSpecWorker",
    "layers.attention.base_attn_backend.AttentionBackend",
    "mem_cache.allocation_sizing.get_alloc_len_per_decode",
    "mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
    "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    "mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
    "mem_cache.common.release_kv_cache",
    "mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    "managers.overlap_utils.FutureMap.publish",
    "managers.overlap_utils.FutureMap.stash",
    "managers.overlap_utils.FutureMap.resolve_seq_lens_cpu",
    "managers.overlap_utils.FutureMap._resolve_spec_extras",
    "managers.scheduler.Scheduler.run_batch",
    "managers.scheduler.Scheduler.maybe_init_draft_worker",
    "managers.scheduler.Scheduler.init_overlap",
    "managers.scheduler.Scheduler.event_loop_overlap",
    "managers.scheduler.Scheduler.update_running_batch",
    "managers.schedule_batch.ScheduleBatch.retract_decode",
    "managers.schedule_batch.release_req",
    "managers.schedule_policy.PrefillAdder.add_one_req",
    "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
    "mem_cache.unified_radix_cache.UnifiedRadixCache.writing_check",
    "managers.cache_controller.HiCacheController.start_writing",
    "managers.scheduler.Scheduler._reqs_finishing_inflight",
    "managers.scheduler.Scheduler._apply_war_barrier",
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    "managers.schedule_batch.Req.update_finish_state",
    "layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
    "layers.sampler.apply_custom_logit_processor",
    "model_executor.model_runner.ModelRunner._forward_raw",
    "model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
    "model_executor.runner_utils.capture_mode.model_capture_mode",
    "model_executor.model_runner_components.cuda_graph_setup.finalize_cuda_graph_capture",
    "kv_canary.runner.canary_manager.CanaryManager.mark_init_finished",
    "utils.phase_checker.SimplePhaseChecker.enable_assert",
)


class ContractError(RuntimeError):
    """The SGLang here is not the one that this package is made for."""


def signature(dotted: str) -> list[str]:
    return list(inspect.signature(_unwrapped(dotted)).parameters)


def fields(dotted: str) -> list[str]:
    cls = pkgutil.resolve_name(SRT + dotted)
    return sorted(getattr(cls, "__dataclass_fields__", ()))


def fingerprint(dotted: str) -> str:
    """Hash of the parsed source: comments, layout and Python's version do not count."""
    source = textwrap.dedent(inspect.getsource(_unwrapped(dotted)))
    return hashlib.sha256(outline(ast.parse(source)).encode()).hexdigest()[:16]


def outline(node: Any) -> str:
    """A syntax tree as text. `ast.dump` writes what is empty in some versions of Python, and some have fields
    that others lack (the type parameters of a function since 3.12)."""
    if isinstance(node, list):
        return "[" + ",".join(map(outline, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    found = [(name, getattr(node, name, None)) for name in node._fields]
    parts = [f"{name}={outline(value)}" for name, value in found if value is not None and value != []]
    return f"{type(node).__name__}({','.join(parts)})"


def _unwrapped(dotted: str) -> Any:
    # Our own hooks wrap some of these.
    return inspect.unwrap(pkgutil.resolve_name(SRT + dotted))


def _interface_gaps() -> list[str]:
    """Public methods of SGLang's enum that our algorithm lacks: each is an AttributeError waiting."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_sparsespec.algorithm import SparseSpecAlgorithm

    public = {
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    return sorted(public - set(dir(SparseSpecAlgorithm)))


def take_contract() -> dict[str, Any]:
    """The contract as the installed SGLang has it."""
    return {
        "sglang": installed_version(),
        "signatures": {name: signature(name) for name in SIGNATURES},
        "behaviour": {name: fingerprint(name) for name in BEHAVIOUR},
    }


def installed_version() -> str:
    return metadata.version("sglang")


def find_breaches(contract: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Compare the installed SGLang with `contract`.

    Returns:
        breaches: what cannot work. suspicions: code that we rely on and that was changed.
    """
    breaches, suspicions = [], []
    for name, wanted in contract["signatures"].items():
        found = _try(signature, name)
        if found != wanted:
            breaches.append(f"{SRT}{name} takes {found}, expected {wanted}")
    for name, wanted in FIELDS.items():
        missing = sorted(set(wanted.split()) - set(_try(fields, name) or ()))
        if missing:
            breaches.append(f"{SRT}{name} lacks {', '.join(missing)}")
    for name, wanted in contract["behaviour"].items():
        found = _try(fingerprint, name)
        if found is None:
            breaches.append(f"{SRT}{name} is gone")
        elif found != wanted:
            suspicions.append(f"{SRT}{name} was changed")
    breaches += [f"SparseSpecAlgorithm lacks {name}()" for name in _interface_gaps()]
    return breaches, suspicions


def _try(function: Any, name: str) -> Any:
    try:
        return function(name)
    except (AttributeError, ImportError, OSError, TypeError):
        return None


def check_version() -> None:
    """Raise ContractError unless the installed SGLang is the supported release."""
    version = installed_version()
    if version != SUPPORTED_SGLANG and os.environ.get(ALLOW_UNTESTED_ENV) != "1":
        raise ContractError(_ways_out(f"sglang {version} is installed"))


def check_contract(*, strict: bool = False) -> None:
    """Raise ContractError unless the SGLang here is what we were made for.

    Args:
        strict: changed code that we rely on is an error too, not only a warning (CI).
    """
    check_version()
    breaches, suspicions = find_breaches(json.loads(CONTRACT_FILE.read_text()))
    if breaches or (strict and suspicions):
        raise ContractError(_ways_out("; ".join(breaches + suspicions)))
    for suspicion in suspicions:
        logger.warning("SPARSESPEC relies on code of SGLang that differs here: %s", suspicion)


def _ways_out(found: str) -> str:
    return (
        f"sglang-sparsespec is made for sglang {SUPPORTED_SGLANG} and cannot run on this one: {found}. "
        f"Ways out: (1) pip install sglang=={SUPPORTED_SGLANG}; (2) install the release of sglang-sparsespec "
        "made for your SGLang; (3) start without --speculative-algorithm SPARSESPEC. "
        f"({ALLOW_UNTESTED_ENV}=1 skips the version check alone, at your own risk.)"
    )


# -- accessors to SGLang's private surface -------------------------------------


def model_config_of(server_args: Any) -> Any:
    """The `ModelConfig` behind server arguments, also behind the stand-in that plugins are handed."""
    from sglang.srt.arg_groups.model_override_base import model_config_of as of

    with contextlib.suppress(AttributeError):
        server_args = object.__getattribute__(server_args, "_cfg")
    return of(server_args)


def take_over_cuda_graphs(server_args: Any) -> None:
    """Keep SGLang from capturing its own decode and prefill graphs.

    Micro-steps have graphs of their own, and prefills must show their queries. The batch sizes that SGLang
    resolved for decoding stay, as the sizes of our graphs; the list is empty where the user turned graphs
    off.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = server_args.cuda_graph_config
    if config is None:
        return
    sizes = [] if config.decode.backend == Backend.DISABLED else list(config.decode.bs or [])
    config = with_phase(config, Phase.DECODE, backend=Backend.DISABLED, bs=sizes)
    server_args.cuda_graph_config = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)


def keep_one_kv_pool(server_args: Any) -> None:
    """Let layers with sliding windows keep their KV in the pool of all others, as drafts need it."""
    server_args.disable_hybrid_swa_memory = True


def has_sinks(model_config: Any) -> bool:
    """Whether a model's attention has learned sinks (SGLang's `ModelConfig`)."""
    return bool(model_config.has_attention_sinks)


def add_resolution_step(name: str, step: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Let `step(server_args, previous)` stand around one of SGLang's steps of resolving server arguments."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(name)(step)


def ask_for_host_tier(server_args: Any) -> None:
    """Turn HiCache on, before SGLang resolves its flags."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "sparsespec", enable_hierarchical_cache=True)


def host_memory_gib() -> float:
    """Host memory that SGLang would give its host tier, less what it always leaves, in GiB."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES

    free = available_host_memory_bytes(allow_cgroup_fallback=True)
    return (free - HICACHE_HOST_MEMORY_RESERVE_BYTES) / 2**30


@contextlib.contextmanager
def growth_of(tokens: int) -> Iterator[None]:
    """Let SGLang's admission count on `tokens` of output, where it counts on up to 4,096."""
    from sglang.srt.managers import schedule_policy

    before = schedule_policy.CLIP_MAX_NEW_TOKENS
    schedule_policy.CLIP_MAX_NEW_TOKENS = tokens
    try:
        yield
    finally:
        schedule_policy.CLIP_MAX_NEW_TOKENS = before


def takes_victims_by_priority() -> bool:
    """Whether `--retraction-policy priority` says who leaves a full pool."""
    from sglang.srt.runtime_context import get_schedule

    return get_schedule().retraction_policy == "priority"


def keeps_order_of_arrival(scheduler: Any) -> bool:
    """Whether the waiting queue is served as it stands."""
    return scheduler.policy.policy.value == "fcfs" and not scheduler.enable_priority_scheduling


class TreeMemory:
    """SGLang's radix tree with its host tier (`UnifiedRadixCache`), for `memory.offload`."""

    NEVER = 1 << 30  # times that KV is seen before it is copied to the host

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def length(self, req: Any) -> int:
        return req.kv.kv_committed_len

    def fresh(self, req: Any) -> int:
        if req.skip_radix_cache_insert or req.finished():
            return 0
        return max(0, req.kv.kv_committed_len - req.kv.cache_inserted_len)

    def checkpoint(self, req: Any, *, whole: bool) -> None:
        if req.skip_radix_cache_insert:
            return
        if whole:
            # The tree passes over what a request had put into it before, which the host may not have.
            req.kv.cache_inserted_len = 0
        req.refresh_fill_ids()
        self._tree.checkpoint(req, up_to=req.kv.kv_committed_len)

    def back_up(self, on: bool) -> None:
        self._tree.write_through_threshold = 1 if on else self.NEVER
        self._tree.load_back_threshold = 1  # SGLang computes a few tokens anew rather than load them

    def finish_copies(self) -> None:
        self._tree.writing_check(write_back=True)


class SchedulerMemory(TreeMemory):
    """What a scheduler's KV pool holds, for `memory.offload`."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler.tree_cache)
        self._scheduler = scheduler

    def room(self) -> tuple[int, int]:
        allocator = self._scheduler.token_to_kv_pool_allocator
        return allocator.available_size() + self._tree.evictable_size(), int(allocator.size)

    def needed(self, batch: Any) -> int:
        return batch.new_tokens_required_next_decode()

    def fits(self, batch: Any) -> bool:
        return batch.check_decode_mem()

    def queued(self) -> bool:
        return bool(self._scheduler.waiting_queue)

    def process_results(self) -> bool:
        queue = getattr(self._scheduler, "result_queue", None)  # there with overlap scheduling
        if not queue:
            return False
        while queue:
            self._scheduler.process_batch_result(*queue.popleft())
        # SGLang's loop would take another result of this batch.
        self._scheduler.last_batch = None
        return True


def host_tier(tree: Any) -> tuple[int, int]:
    """Tokens in the host tier, and tokens that it holds; zeros without one."""
    controller = getattr(tree, "cache_controller", None)
    if controller is None:
        return 0, 0
    pool = controller.mem_pool_host
    return int(pool.logical_size - pool.available_size()), int(pool.logical_size)


def host_tier_size(tree: Any) -> tuple[int, int]:
    """Bytes and tokens of the host tier; zeros without one."""
    controller = getattr(tree, "cache_controller", None)
    if controller is None:
        return 0, 0
    pool = controller.mem_pool_host
    return int(pool.logical_size * pool.size_per_token), int(pool.logical_size)


def same_on_all_ranks(value: Any) -> Any:
    """The first tensor-parallel rank's `value`."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group.broadcast_object(value, src=0)


def graph_batch_sizes() -> list[int]:
    """Batch sizes that decode graphs are wanted for, in the scheduler process."""
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    return [] if config is None else list(config.decode.bs or [])


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A CUDA object that the collector frees in the middle of a capture would invalidate it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def capture_graphs() -> Iterator[Callable[[Callable[[], Any]], tuple[Any, Any]]]:
    """Capture on SGLang's capture stream, into its graph memory pool, with its collectives prepared.

    Yields a function that warms another function up, captures it, and returns the graph and its output.
    """
    import torch
    from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.model_executor.runner_utils.pool import (
        get_or_create_global_graph_capture_stream,
        get_or_create_global_graph_memory_pool,
    )
    from sglang.srt.runtime_context import get_parallel

    pool = get_or_create_global_graph_memory_pool(torch.cuda)
    set_graph_pool_id(pool)

    stream = get_or_create_global_graph_capture_stream()
    with _no_garbage_collection(), model_capture_mode(), graph_capture(stream=stream) as context:

        def capture_one(function: Callable[[], Any]) -> tuple[Any, Any]:
            for _ in range(2):
                torch.cuda.synchronize()
                get_parallel().tp_group.barrier()
                function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=context.stream):
                out = function()
            return graph, out

        yield capture_one


def model_logits(runner: Any, forward_batch: Any) -> Any:
    """The target model alone, without SGLang's choice of a runner: logits of all tokens, [T, V]."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_model

    canary = runner.canary_manager
    with (
        canary.with_active_single_forward_manager(0) if canary is not None else contextlib.nullcontext(),
        get_model().override(shared_experts=runner.model.shared_experts_config),
        forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=forward_batch),
    ):
        out = runner.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
    return out.next_token_logits


def watched_by_canary(runner: Any) -> bool:
    """Whether SGLang's KV canary is on. Makes room in it for micro-steps: up to two slots a request."""
    if runner.canary_manager is None:
        return False
    for manager in runner.canary_manager._single_forward_managers:
        manager._write_entry_capacity += manager._write_req_capacity
        manager._write_req_capacity *= 2
    return True


@contextlib.contextmanager
def canary_at_rest(runner: Any) -> Iterator[None]:
    """SGLang's KV canary as it is while SGLang itself warms up and captures, where it checks no order of
    steps; by the time that micro-steps are captured, it has begun to."""
    canary = runner.canary_manager
    if canary is None:
        yield
        return
    for manager in canary._single_forward_managers:
        manager.phase_checker._enable_assert_device.zero_()
    canary._device_state.enable_chain_position_assert.zero_()
    try:
        yield
    finally:
        canary.mark_init_finished()


def canary_step(runner: Any, rows: int, positions: Any) -> contextlib.AbstractContextManager[None]:
    """Around a micro-step of `rows` slots that does not go through SGLang's runner: what its KV canary does
    outside of graphs."""
    batch = SimpleNamespace(
        batch_size=rows, positions=positions, req_all_ids_flat=None, req_all_ids_lens=None
    )
    return runner.canary_manager.with_ops_outside_graph(
        single_forward_indices=[0], maybe_inaccurate_forward_batch=batch
    )


def written_rows(
    *, pools: Any, prefix: Any, lengths: Any, input_ids: Any, positions: Any, out_cache_loc: Any
) -> SimpleNamespace:
    """A micro-step as SGLang's KV canary reads a prefill.

    Args:
        pools, prefix, lengths: [rows]: tokens of a row stand together; `prefix` have KV already.
        input_ids, positions, out_cache_loc: [T].
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        spec_info=None,
        req_pool_indices=pools,
        extend_prefix_lens=prefix,
        extend_seq_lens=lengths,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=out_cache_loc,
        req_all_ids_lens=None,
    )


def read_micro_step(read: Callable[..., Any], manager: Any, forward_batch: Any, *results: Any) -> Any:
    """Show SGLang's KV canary a micro-step's rows; it takes verifications for rows of k + 1 tokens each."""
    rows = getattr(forward_batch.spec_info, "written", None)
    return read(manager, forward_batch if rows is None else rows, *results)


def mask_by_grammars(logits: Any, reqs: Sequence[Any], drafts: Any) -> None:
    """Forbid, in place, what the grammars of `reqs` (SGLang's Req) forbid at each position.

    Waits for the device: grammars follow the drafts on the host, and go back.

    Args:
        logits: [R, Q, V] float32 of verifications, contiguous. drafts: [R, Q-1] that they verify.
    """
    import torch
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.speculative.spec_utils import GrammarTree, generate_token_bitmask

    rows, width, vocabulary = logits.shape
    # Its first token is the one before the drafts, which the grammars have accepted already.
    chain = torch.zeros(rows, width, dtype=torch.int64)
    chain[:, 1:] = drafts.cpu()
    tree = GrammarTree.from_linear_chain(chain)
    mask, grammar = generate_token_bitmask(list(reqs), *tree.resolve(), vocabulary)
    if mask is not None:
        GrammarMask(grammar, mask.to(logits.device)).apply(logits.view(rows * width, vocabulary))


def wants_idle(message: Any) -> bool:
    """Whether SGLang fails this message, or ends itself over it, while something is running."""
    from sglang.srt.managers import io_struct

    kinds = (io_struct.FlushCacheReqInput, io_struct.ReleaseMemoryOccupationReqInput)
    # Updates of weights have a field of this name, and without it take no notice of what is running.
    return isinstance(message, kinds) or getattr(message, "flush_cache", False)


def must_wait(scheduler: Any, message: Any) -> bool:
    """Whether SGLang would end itself over this message: memory is released while something runs."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    releases = isinstance(message, ReleaseMemoryOccupationReqInput)
    return releases and not scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)


def update_from_disk(update: Any, updater: Any, message: Any) -> Any:
    """SGLang's `update_weights_from_disk`; an unknown format fails as an unknown path does."""
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    known = [each.value for each in LoadFormat]
    if message.load_format is not None and message.load_format not in known:
        text = f"load_format is {message.load_format!r}; allowed are {', '.join(known)}."
        return UpdateWeightFromDiskReqOutput(success=False, message=text, num_paused_requests=0)
    return update(updater, message)


def clear_output_logprobs(req: Any) -> None:
    """Drop all log-probabilities of output tokens that a request (`Req`) has so far."""
    for kind in ("token", "top", "token_ids"):
        for part in ("val", "idx"):
            values = getattr(req.logprob, f"output_{kind}_logprobs_{part}")
            if values is not None:
                values.clear()


def change_memory(change: Any, updater: Any, message: Any, *, device: str) -> Any:
    """Release or resume what is not released or resumed already: SGLang ends itself over a second time.

    Args:
        change: SGLang's `release_memory_occupation` or `resume_memory_occupation`.
        device: on "cpu" nothing can be released; the KV cache is flushed as elsewhere.
    """
    from sglang.srt import constants
    from sglang.srt.managers import io_struct

    releases = isinstance(message, io_struct.ReleaseMemoryOccupationReqInput)
    released = updater.offload_tags
    known = constants.GPU_MEMORY_ALL_TYPES
    tags = [tag for tag in message.tags or known if tag in known and (tag in released) != releases]
    message.tags = tags
    if tags and device != "cpu":
        return change(updater, message)
    (released.update if releases else released.difference_update)(tags)
    if releases and constants.GPU_MEMORY_TYPE_KV_CACHE in tags:
        updater.flush_cache()
    kind = "Release" if releases else "Resume"
    return getattr(io_struct, f"{kind}MemoryOccupationReqOutput")()


def is_settling(scheduler: Any) -> bool:
    """Whether all that still runs are steps of requests which have already ended."""
    if scheduler._engine_paused or scheduler.waiting_queue or scheduler.chunked_req is not None:
        return False
    batches = [scheduler.running_batch, scheduler.last_batch]
    batches += [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    reqs = [req for batch in batches if batch is not None for req in batch.reqs]
    return bool(reqs) and all(req.finished() for req in reqs)


def has_processors(batch: Any) -> bool:
    """Whether some request of SGLang's `ScheduleBatch` has a logit processor."""
    return any(req.custom_logit_processor for req in batch.reqs)


class _Seen:
    """A request as it will be once it has put out `more` tokens."""

    def __init__(self, req: Any, more: Sequence[int]) -> None:
        self._req = req
        self.output_ids = [*req.output_ids, *more]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def process_logits(logits: Any, reqs: Sequence[Any], drafts: Any) -> None:
    """Let the requests' own logit processors change, in place, the logits of each position.

    Waits for the device: processors may look at the tokens before them. Position i is shown drafts 1 to i.

    Args:
        logits: [R, Q, V] float32 of verifications. drafts: [R, Q-1] that they verify.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    rows = [row for row, req in enumerate(reqs) if req.custom_logit_processor]
    tokens = drafts[rows].tolist()
    for row, more in zip(rows, tokens, strict=True):
        req, width = reqs[row], logits.shape[1]
        given = req.sampling_params.custom_params
        params = [given] * width
        if isinstance(given, dict):
            params = [{**given, "__req__": _Seen(req, more[:position])} for position in range(width)]
        processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
        logits[row] = processor(logits[row].clone(), params).to(logits.dtype)


def verified_logprobs(batch: Any, logits: Any, tokens: Any) -> Any:
    """What the scheduler reads log-probabilities from, by SGLang's own convention of temperatures.

    Args:
        batch: SGLang's ScheduleBatch of a decode step. logits: [B, k+1, V] of verifications.
        tokens: [B, k+1], whose undefined ones may be any number.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs

    _, width, vocabulary = logits.shape
    output = LogitsProcessorOutput(next_token_logits=logits.view(-1, vocabulary))
    chosen = tokens.clamp(0, vocabulary - 1).reshape(-1)
    compute_spec_logprobs(batch, output, chosen, chain_stride=width)
    output.next_token_logits = None
    return output


def plain_linears(model: Any) -> Iterator[Any]:
    """The model's linear layers whose weights are as loaded, [N, K], in the order of the modules."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    for layer in model.modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            weight = getattr(layer, "weight", None)
            # On some CPUs SGLang repacks weights into a shape of their own.
            if (
                weight is not None
                and weight.dim() == 2
                and not getattr(layer, "use_intel_amx_backend", False)
            ):
                yield layer


def wrap_linear(layer: Any, apply: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Let `apply(own, x, bias)` compute a linear layer's product; `own(x, bias)` is what it was before."""
    method = layer.quant_method
    own = method.apply

    def instead(layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(lambda x, bias: own(layer, x, bias), x, bias)

    # The instance is the layer's alone: LinearBase makes one for each.
    method.apply = instead


def plain_output_layer(model: Any) -> Any:
    """The module that holds the weights of the logits, [V, K], as loaded; None where there is none such."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    layer, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    if layer is None or processor is None or type(layer.quant_method) is not UnquantizedEmbeddingMethod:
        return None
    # Logits that are wanted in another type are no product of these weights alone.
    special = (processor.use_fp32_lm_head, processor.use_fp32_lm_head_output, processor.rl_on_policy_target)
    if any(special) or getattr(layer, "use_intel_amx_backend", False) or layer.weight.dim() != 2:
        return None
    return layer


def wrap_output_layer(model: Any, apply: Callable[[Callable[[], Any], Any], Any]) -> None:
    """Let `apply(own, hidden)` compute the logits; `own()` gives what they were before."""
    processor, layer = model.logits_processor, model.lm_head
    before = processor._compute_lm_head

    def instead(hidden: Any, lm_head: Any, embedding_bias: Any = None, *, out: Any = None) -> Any:
        def own() -> Any:
            return before(hidden, lm_head, embedding_bias, out=out)

        return apply(own, hidden) if lm_head is layer and embedding_bias is None else own()

    processor._compute_lm_head = instead


def multiply_fp8(x: Any, weight: Any, row_scales: Any, scales: Any, *, dtype: Any, bias: Any = None) -> Any:
    """x [T, K] times weight [N, K], both float8_e4m3fn, with scales [T, 1] and [N]: [T, N] of `dtype`."""
    import torch

    if not len(x):
        return torch.empty(0, len(weight), dtype=dtype, device=x.device)
    from sgl_kernel import fp8_scaled_mm

    # The kernel wants the weight by columns, which is how it lies.
    return fp8_scaled_mm(x, weight.t(), row_scales, scales.view(-1, 1), dtype, bias)


def marlin_source() -> str:
    """SGLang's Marlin GEMM, left with what drafts need: symmetric codes of 4 and 8 bits, groups of 128.

    The whole file holds some 400 kernels, which compile for a quarter of an hour; these 30 take a minute.
    """
    import sglang.kernels.jit

    path = Path(sglang.kernels.jit.__file__).parent / "csrc/gemm/marlin/gptq_marlin.cuh"
    text = path.read_text()
    others = r"_GET_IF\(W_TYPE, \d, N_BLOCKS, K_BLOCKS, (true|false), (-1|2|4), NUM_THREADS, false\)\s*\\"
    unused = r"((FP4|BIGGROUP|ACT|FZP)_GET_IF\(host::\w+\)|COMMON_GET_IF\(host::kU4\))"
    # Definitions of macros that are left without a use cost nothing.
    reduced = re.sub(rf"^[ ]*({others}|{unused})\n", "", text, flags=re.MULTILINE)
    return reduced.replace('#include "', f'#include "{path.parent}/')


def _kept(source: str, folder: Path) -> Path:
    """A file of the folder that holds `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"draft_gemm-{hashlib.sha256(source.encode()).hexdigest()[:16]}.cuh"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(source)
        draft.replace(path)
    return path


class Marlin:
    """SGLang's Marlin kernels for one device and type of activations; compiled when made, and kept.

    Raises:
        ImportError, RuntimeError, OSError: they cannot be built here.
    """

    def __init__(self, device: Any, dtype: Any) -> None:
        import torch
        from sgl_kernel_ext.cuda_build import cache_dir
        from sglang.kernels.jit.utils import load_jit, make_cpp_args
        from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
        from sglang.srt.layers.quantization import marlin_utils

        self._repack, self._utils = gptq_marlin_repack, marlin_utils
        arguments = make_cpp_args(dtype)
        self._module = load_jit(
            "sparsespec_draft_gemm",
            *arguments,
            cuda_files=[str(_kept(marlin_source(), cache_dir()))],
            cuda_wrappers=[("multiply", f"gptq_marlin_gemm<{arguments}>")],
        )
        types = marlin_utils.scalar_types
        self._types = {4: types.uint4b8.id, 8: types.uint8b128.id}
        self._workspace = marlin_utils.marlin_make_workspace(device)
        units = torch.cuda.get_device_properties(device).multi_processor_count
        self._sums = torch.empty(units * 64 * 256, dtype=torch.float32, device=device)
        self._no_indices = torch.empty(0, dtype=torch.int32, device=device)
        self._no_values = torch.empty(0, dtype=dtype, device=device)

    def pack(self, codes: Any, scales: Any, *, bits: int, group: int) -> tuple[Any, Any]:
        """Codes [N, K] uint8 and scales [N, K / group], as the kernel wants them."""
        import torch

        outputs, inputs = codes.shape
        each = 32 // bits
        # GPTQ's layout: [K / each, N] int32, the first input in the lowest bits.
        parts = codes.T.reshape(inputs // each, each, outputs).to(torch.int32)
        packed = torch.zeros(inputs // each, outputs, dtype=torch.int32, device=codes.device)
        for at in range(each):
            packed |= parts[:, at] << (bits * at)
        packed = self._repack(packed, self._no_indices, inputs, outputs, bits)
        ordered = self._utils.marlin_permute_scales(scales.T.contiguous(), inputs, outputs, group)
        return packed, ordered

    def multiply(self, x: Any, codes: Any, scales: Any, *, bits: int, outputs: int) -> Any:
        """x [T, K] times packed codes: [T, N = outputs], summed in float32."""
        import torch

        out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
        if len(x):
            self._module.multiply(
                x.contiguous(),
                codes,
                scales,
                self._no_values,  # global scale
                self._no_indices,  # zero points
                self._no_indices,  # groups in the order of activations
                self._no_indices,
                out,
                self._sums,
                self._no_values,
                self._workspace,
                self._types[bits],
                True,  # all of K is here
                False,  # atomic sums would not be the same twice
                True,  # sum in float32
                False,  # zero points are no floats
            )
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the contract with the installed SGLang.")
    parser.add_argument("--write", action="store_true", help="take the contract anew from what is installed")
    if parser.parse_args().write:
        CONTRACT_FILE.write_text(json.dumps(take_contract(), indent=1) + "\n")
        print(f"wrote {CONTRACT_FILE}")
        return
    check_contract(strict=True)
    print(f"[ok] sglang {installed_version()} keeps the contract")


if __name__ == "__main__":
    main()
