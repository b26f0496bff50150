"""Every place where SGLang's behaviour is changed at run time: target, reason, and proof that it is in
effect.

SGLang only logs a hook that fails. `install` and `verify` therefore raise, from places that SGLang does
not guard.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_sparsespec import compat
from sglang_sparsespec.config import CONFIG_ENV, SparseSpecConfig
from sglang_sparsespec.memory.offload import Offload
from sglang_sparsespec.rounds.planner import kv_reserve


class HookError(RuntimeError):
    """A hook is not in effect; serving on would be wrong."""


@dataclass(frozen=True)
class Hook:
    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str


# -- in every process: the launcher's parser -------------------------------------


class _SetConfig(argparse.Action):
    """SGLang's parser keeps its own record's fields only; spawned processes inherit the environment."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        os.environ[CONFIG_ENV] = values


def _add_flag(result: Any, parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sparsespec-config",
        action=_SetConfig,
        default=argparse.SUPPRESS,
        metavar="JSON|FILE",
        help=f"SPARSESPEC settings: a JSON object or the path of a JSON file (the same as {CONFIG_ENV}).",
    )


EVERYWHERE: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        _add_flag,
        "the command line has no seam for a plugin's flags",
    ),
)


# -- in the scheduler process, with SPARSESPEC selected -------------------------------------

HELD = "_sparsespec_held"  # the scheduler's messages that wait, and all behind them
ASIDE = "_sparsespec_aside"  # those that others may overtake
FAULT = "_sparsespec_fault"  # what is wrong with the request that it is looking at


def _note_fault(scheduler: Any, recv_req: Any, **options: Any) -> None:
    """SGLang ends itself over a start of log-probabilities before the prompt."""
    start = recv_req.logprob_start_len
    fault = None
    if start < -1:
        fault = f"logprob_start_len is {start}; allowed are 0 and more, and -1 for output tokens only."
        recv_req.logprob_start_len = -1
    setattr(scheduler, FAULT, fault)


def _refuse_request(result: str | None, scheduler: Any, req: Any) -> str | None:
    from sglang_sparsespec.refusals import request_fault, request_refusal

    return result or getattr(scheduler, FAULT, None) or request_fault(req) or request_refusal(req)


def _put_out_nothing(result: Any, processor: Any, i: int, req: Any, *args: Any) -> Any:
    """Without a token to put out there is no log-probability of one, as without speculation."""
    if req.sampling_params.max_new_tokens == 0:
        compat.clear_output_logprobs(req)
    return result


def _wait_for_the_host(result: bool, scheduler: Any, batch: Any, last_batch: Any) -> bool:
    decodes = batch is not None and batch.forward_mode.is_decode() and len(scheduler.result_queue) > 0
    return result or (decodes and compat.has_processors(batch))


def _settle_first(process: Any, scheduler: Any, recv_reqs: list[Any]) -> None:
    """Messages that want an idle scheduler, and those after them, wait for rounds that outlive requests.

    A client that has its last reply may send such a message at once, while a step or a whole round for the
    ended request is still running. One over which SGLang would end itself waits for requests too.
    """
    messages = [*getattr(scheduler, ASIDE, ()), *getattr(scheduler, HELD, ()), *recv_reqs]
    ready: list[Any] = []
    aside: list[Any] = []
    held: list[Any] = []
    for at, message in enumerate(messages):
        if compat.wants_idle(message):
            process(scheduler, ready)
            ready = []
            if compat.must_wait(scheduler, message):
                aside.append(message)
                continue
            if compat.is_settling(scheduler):
                held = messages[at:]
                break
        ready.append(message)
    setattr(scheduler, ASIDE, aside)
    setattr(scheduler, HELD, held)
    process(scheduler, ready)


def _refresh_draft_weights(result: Any, updater: Any, recv_req: Any) -> Any:
    updater.draft_worker.refresh_draft_weights()
    return result


def _update_from_disk(update: Any, updater: Any, recv_req: Any) -> Any:
    return _refresh_draft_weights(compat.update_from_disk(update, updater, recv_req), updater, recv_req)


def _seed_prefills(result: Any, *args: Any) -> Any:
    from sglang_sparsespec.sampling.seeds import sample_prefilled

    return sample_prefilled(result, *args)


def _describe(result: Any, reporter: Any, recv_req: Any) -> None:
    result.internal_state["sparsespec"] = reporter.scheduler.draft_worker.describe()


def _report_memory(result: Any, scheduler: Any) -> Any:
    scheduler.draft_worker.report_memory(compat.host_tier_size(scheduler.tree_cache))
    return result


def scheduler_hooks(config: SparseSpecConfig, device: str) -> list[Hook]:
    """The hooks that a scheduler needs for this configuration on this device."""
    reserve = kv_reserve(config.stride, config.schedule)
    sizing = "sglang.srt.mem_cache.allocation_sizing"
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    stale = "an update need not flush, and drafts would go on with copies of the old weights"
    canary = "sglang.srt.kv_canary.single_forward_manager.manager.SingleForwardManager"
    found = [
        Hook(
            f"{sizing}.get_alloc_reserve_per_decode",
            HookType.AFTER,
            lambda result: max(result, reserve),
            "a unified round writes up to 3k+2 positions past the last known committed length",
        ),
        Hook(
            f"{sizing}.get_req_to_token_extra_context_len",
            HookType.AFTER,
            lambda result: max(result, reserve),
            "a request at its context limit would write its reserve into the next request's page-table row",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.validate_dllm_request",
            HookType.AFTER,
            _refuse_request,
            "requests that a registered algorithm cannot serve have no seam; this one answers with HTTP 400",
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
            HookType.AFTER,
            _describe,
            "/server_info shows SGLang's own fields only",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.init_overlap",
            HookType.AFTER,
            _report_memory,
            "the host tier is made after all that a worker is told of",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
            HookType.AFTER,
            _wait_for_the_host,
            "logit processors are shown what was put out, which overlap scheduling does not know yet",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
            HookType.AROUND,
            _settle_first,
            "a flush or weight update right after the last reply would fail on the round that still runs",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
            HookType.BEFORE,
            _note_fault,
            "a request with a bad logprob_start_len would end the scheduler",
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.logprob_result_processor."
            "SchedulerLogprobResultProcessor.add_logprob_return_values",
            HookType.AFTER,
            _put_out_nothing,
            "with any speculation SGLang gives a request for 0 tokens the log-probability of one",
        ),
        Hook(
            f"{updater}.update_weights_from_disk",
            HookType.AROUND,
            _update_from_disk,
            f"an unknown load_format would end the scheduler; {stale}",
        ),
        *(
            Hook(
                f"{updater}.{change}",
                HookType.AFTER,
                _refresh_draft_weights,
                stale,
            )
            # Updates from tensors and from process groups stand before an end.
            for change in ("update_weights_from_ipc", "end_weight_update")
        ),
        *(
            Hook(
                f"{updater}.{change}_memory_occupation",
                HookType.AROUND,
                partial(compat.change_memory, device=device),
                "a second release or resume would end the scheduler, and on a CPU the first one",
            )
            for change in ("release", "resume")
        ),
        Hook(
            "sglang.srt.layers.sampler.Sampler._sample_from_probs",
            HookType.AFTER,
            _seed_prefills,
            "SGLang draws a request's first token, and without deterministic inference it ignores seeds",
        ),
        *(
            Hook(
                f"{canary}.{part}_ops_maybe_inside_graph",
                HookType.AROUND,
                compat.read_micro_step,
                "the KV canary takes every row of a verification for k + 1 tokens",
            )
            for part in ("pre", "post")
        ),
    ]
    if device == "cpu":
        from sglang_sparsespec.platforms.cpu_ops import cpu_op_replacements

        found += [
            Hook(target, HookType.REPLACE, function, "SGLang has this only as a Triton kernel")
            for target, function in cpu_op_replacements().items()
        ]
    return found


# -- in the scheduler process, where KV may leave for host memory -------------------------------------


def offload_hooks(offload: Offload) -> list[Hook]:
    """The hooks through which `offload` sees a scheduler's requests, and decides."""

    def before_round(update: Any, scheduler: Any, batch: Any) -> Any:
        if not batch.is_empty():
            offload.before_round(compat.SchedulerMemory(scheduler), batch)
        return update(scheduler, batch)

    def keep(order: list[int], reqs: list[Any]) -> list[int]:
        return order if compat.takes_victims_by_priority() else offload.kept_first(reqs)

    def leave(batch: Any, idx: int, remaing_req_count: int, offload_kv: bool = True) -> None:
        if offload_kv:
            offload.leaves(compat.TreeMemory(batch.tree_cache), batch.reqs[idx])

    def queue(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
        offload.arrived(req)
        waiting = scheduler.waiting_queue
        if is_retracted and waiting and waiting[-1] is req and compat.keeps_order_of_arrival(scheduler):
            offload.place_in_queue(waiting)
        return result

    def limit(is_full: Any, scheduler: Any, req: Any) -> bool:
        return req.rid not in offload.out and is_full(scheduler, req)

    def drop(result: Any, scheduler: Any, req: Any) -> Any:
        offload.forget(req)
        return result

    def grow(result: Any, adder: Any, req: Any) -> int:
        return offload.ahead(req)

    def admit(add: Any, adder: Any, req: Any, *args: Any, **options: Any) -> Any:
        with compat.growth_of(offload.ahead(req)):
            result = add(adder, req, *args, **options)
        if adder.can_run_list and adder.can_run_list[-1] is req:
            offload.admitted(req, cached=req.prefix_len, loaded=req.materialized_host_hit_len())
        return result

    def count(result: Any, tree: Any, ack: Any) -> Any:
        offload.wrote(ack.num_tokens, ack.num_bytes)
        return result

    def describe(result: Any, reporter: Any, recv_req: Any) -> None:
        held, size = compat.host_tier(reporter.scheduler.tree_cache)
        result.internal_state["sparsespec"]["offload"] = offload.describe(held, size)

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    batch = "sglang.srt.managers.schedule_batch.ScheduleBatch"
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    admission = "SGLang admits by the most that a request may put out, and the pool would stand half empty"
    return [
        Hook(
            f"{scheduler}.update_running_batch",
            HookType.AROUND,
            before_round,
            "SGLang puts KV into its tree when a request ends, and its retraction throws the rest away",
        ),
        Hook(
            f"{batch}._get_decode_retraction_order",
            HookType.AFTER,
            keep,
            "SGLang takes out who has put out least, which may be the same one again and again",
        ),
        Hook(f"{batch}.release_req", HookType.BEFORE, leave, "retraction does not put KV into the tree"),
        Hook(
            f"{scheduler}._add_request_to_queue",
            HookType.AFTER,
            queue,
            "SGLang puts who was taken out behind all that wait",
        ),
        Hook(
            f"{scheduler}._abort_on_queued_limit",
            HookType.AROUND,
            limit,
            "who was taken out would be refused as if it came anew, in the middle of its output",
        ),
        Hook(f"{scheduler}._release_aborted_request", HookType.AFTER, drop, "it ended while it was out"),
        Hook(f"{adder}._get_running_request_total_token_offset", HookType.AFTER, grow, admission),
        Hook(f"{adder}.add_one_req", HookType.AROUND, admit, admission),
        Hook(
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._log_write_ack_metrics",
            HookType.AFTER,
            count,
            "SGLang counts copies in Prometheus only",
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
            HookType.AFTER,
            describe,
            "/server_info shows SGLang's own fields only",
        ),
    ]


# -- registration and proof -------------------------------------


def register(hooks: Sequence[Hook]) -> None:
    """Hand hooks to SGLang, which applies them after all plugins have loaded."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def install(hooks: Sequence[Hook]) -> None:
    """Register and apply at once, then prove it. Raises HookError."""
    register(hooks)
    HookRegistry.apply_hooks()
    verify(hooks)


def verify(hooks: Sequence[Hook]) -> None:
    """Raise HookError unless every hook is in effect at its target."""
    failed = [f"{hook.target} ({hook.reason}): {why}" for hook in hooks if (why := _fault(hook))]
    if failed:
        raise HookError(
            "SPARSESPEC could not change SGLang where it must: " + "; ".join(failed) + ". The log above says "
            "why. Install the supported SGLang release, or start without --speculative-algorithm SPARSESPEC."
        )


def _fault(hook: Hook) -> str | None:
    if hook.target not in HookRegistry._patched:
        return "SGLang did not apply the hook"
    live = pkgutil.resolve_name(hook.target.rsplit(".", 1)[0])
    function = getattr(live, hook.target.rsplit(".", 1)[1], None)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return None
        function = getattr(function, "__wrapped__", None)
    return "something replaced the hooked function afterwards"
