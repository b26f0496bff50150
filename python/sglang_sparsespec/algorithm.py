"""SPARSESPEC as SGLang's registry sees it: predicates, server arguments, and the way to the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_sparsespec import compat, hooks
from sglang_sparsespec.config import ConfigError, resolve_config
from sglang_sparsespec.memory.offload import Offload
from sglang_sparsespec.refusals import WAYS_OUT, model_refusal, offload_refusals, server_refusals

if TYPE_CHECKING:
    from sglang_sparsespec.worker import SparseSpecWorker

NAME = "SPARSESPEC"
DEFAULT_MAX_RUNNING_REQUESTS = 256
LEAST_HOST_GIB = 8  # less would not hold a few long requests of a model of 8B

logger = logging.getLogger(__name__)


class SparseSpecAlgorithm(CustomSpecAlgo):
    """Predicates all stay False: answering for a built-in algorithm would turn on what only that one has."""

    # SGLang 0.5.23 calls the next four on every algorithm, but its base class for plugins lacks them.

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill SGLang's own fields from the resolved configuration."""
        config = _config_of(server_args)
        server_args.speculative_num_steps = config.stride
        server_args.speculative_num_draft_tokens = config.stride + 1
        server_args.speculative_eagle_topk = 1
        if server_args.max_running_requests is None and server_args.device == "cuda":
            # State and graphs are sized by it.
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        compat.take_over_cuda_graphs(server_args)
        compat.keep_one_kv_pool(server_args)

    def create_worker(self, server_args: Any) -> Any:
        """In the scheduler process, before the pools exist: the last moment for hooks that size them."""
        resolved = resolving_view(server_args)
        config = _config_of(resolved)
        wanted = hooks.scheduler_hooks(config, resolved.device)
        if config.offload != "off" and resolved.enable_hierarchical_cache:
            wanted += hooks.offload_hooks(Offload(config))
        hooks.install(wanted)
        return super().create_worker(server_args)


def want_host_tier(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Turn SGLang's host tier on where the configuration asks for it, just before SGLang resolves its flags.

    Raises:
        ConfigError: `offload` is "on", and the host has too little memory.
    """
    resolved = resolving_view(server_args)
    if (resolved.speculative_algorithm or "").upper() == NAME and not resolved.enable_hierarchical_cache:
        offload = _config_of(resolved).offload
        sized = resolved.hicache_size > 0 or resolved.hicache_host_memory_fraction is None
        free = compat.host_memory_gib() if offload != "off" and not sized else LEAST_HOST_GIB
        if offload != "off" and free >= LEAST_HOST_GIB:
            compat.ask_for_host_tier(server_args)
        elif offload != "off":
            few = (
                f"{max(free, 0):.1f} GiB of host memory are free for KV (SGLang leaves 10 GiB), and "
                f"{LEAST_HOST_GIB} are needed"
            )
            if offload == "on":
                raise ConfigError(
                    f"SPARSESPEC: offload is 'on', but {few}. Free host memory, give the size yourself "
                    "(--hicache-size, in GB), or use offload 'off'."
                )
            logger.warning("SPARSESPEC keeps no KV in host memory: %s.", few)
    previous(server_args)


def validate_server_args(server_args: Any) -> None:
    """Refuse what cannot work, before weights load. SGLang does not swallow what this raises.

    Raises:
        ValueError: a flag, the model or the configuration is not supported; the text names it and the
        ways out.
        RuntimeError: SGLang is not the release this package is made for.
    """
    config = _config_of(server_args)
    compat.check_version()
    refused = server_refusals(server_args)
    if config.offload != "off":
        refused += offload_refusals(server_args)
    if not refused:
        model = model_refusal(compat.model_config_of(server_args))
        refused = [model] if model else []
    if refused:
        raise ValueError("SPARSESPEC cannot start: " + "; ".join(refused) + f". {WAYS_OUT}")
    hooks.verify(hooks.EVERYWHERE)
    compat.check_contract()
    logger.info("SPARSESPEC configuration: %s", config.asdict())


def _config_of(server_args: Any) -> Any:
    try:
        return resolve_config(
            num_steps=server_args.speculative_num_steps,
            num_draft_tokens=server_args.speculative_num_draft_tokens,
        )
    except ConfigError as error:
        raise ConfigError(f"SPARSESPEC: {error}") from None


def create_worker_class(server_args: Any) -> type[SparseSpecWorker]:
    """The registry's factory."""
    from sglang_sparsespec.worker import SparseSpecWorker

    return SparseSpecWorker
