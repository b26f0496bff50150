"""SPARSESPEC as SGLang's registry sees it: predicates, server arguments, and the way to the worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_sparsespec import compat, hooks
from sglang_sparsespec.config import ConfigError, resolve_config
from sglang_sparsespec.refusals import WAYS_OUT, model_refusal, server_refusals

if TYPE_CHECKING:
    from sglang_sparsespec.worker import SparseSpecWorker

NAME = "SPARSESPEC"
DEFAULT_MAX_RUNNING_REQUESTS = 256

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
        hooks.install(hooks.scheduler_hooks(_config_of(resolved), resolved.device))
        return super().create_worker(server_args)


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
