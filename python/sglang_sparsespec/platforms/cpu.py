"""`CpuTorchPlatform`: the seams through which SGLang asks what the CPU can do."""

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

# SGLang keys its torch code paths on this name, so our backend takes it over instead of a name of its own.
ATTENTION_BACKEND = "torch_native"
DEFAULT_MAX_TOTAL_TOKENS = 65536  # the pool is zero-filled at start: unbounded, it touches all free memory
DEFAULT_MAX_RUNNING_REQUESTS = 32
MAX_DEFAULT_THREADS = 8  # a small model does not scale further; OMP_NUM_THREADS overrides

_env_defaults: dict[str, str] = {}  # what _default_env set, so that a second engine here may set it anew


class CpuTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's server, scheduler and radix cache on plain torch: no sgl_kernel, no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    # SGLang splits the name at ":", so it must be a string, although the base class returns a torch.device.
    def get_device(self, device_id: int | None = 0) -> str:
        """Return "cpu"."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Return the name of the attention backend."""
        return ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        """Return "CPU", which SGLang's profiler knows already."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return torch's name of it."""
        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        """Return "native": SGLang's fused layers run their plain torch forward."""
        return "native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open; a value that the user gave stays.

        Raises:
            ValueError: the device is not "cpu", or another attention backend than torch_native was asked for.
        """
        _refuse_other_device(server_args.device)
        _refuse_other_attention_backends(server_args)
        server_args.attention_backend = ATTENTION_BACKEND
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        # The attention here reads one KV pool, whatever windows a layer has.
        server_args.disable_hybrid_swa_memory = True
        server_args.sleep_on_idle = True  # an idle scheduler would spin on a core that other processes need
        _default_thread_env(server_args.tp_size * server_args.dp_size * server_args.pp_size)

    def init_backend(self) -> None:
        """Put our attention backend in place of SGLang's, in each scheduler process."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        from sglang_sparsespec.platforms.cpu_attention import CpuTorchAttnBackend

        ATTENTION_BACKENDS[ATTENTION_BACKEND] = CpuTorchAttnBackend
        _skip_missing_thread_binding()
        _move_host_tier_by_torch()

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Return the KV pool class for `kind`, or None for SGLang's own."""
        if kind != "mha":
            return None
        from sglang_sparsespec.platforms.cpu_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the torch version of SGLang's `assign_extend_cache_locs_func`."""
        from sglang_sparsespec.platforms.cpu_ops import assign_extend_cache_locs

        return assign_extend_cache_locs


def _refuse_other_device(device: str) -> None:
    if device != "cpu":
        raise ValueError(
            f"The CPU platform is active but the device is {device!r}; allowed is 'cpu'. Drop --device and "
            f"hide the accelerator (CUDA_VISIBLE_DEVICES=''), or unset SGLANG_PLATFORM."
        )


def _refuse_other_attention_backends(server_args: Any) -> None:
    # SGLang has already filled in "intel_amx" on x86, so what the user typed is only in the raw input.
    given = getattr(server_args, "_raw_input", {}).get
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        asked = given(name)
        if asked not in (None, ATTENTION_BACKEND):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag}={asked} is not available on the CPU platform; allowed is {ATTENTION_BACKEND}. "
                f"Drop {flag}, or run on a GPU."
            )


def _default_thread_env(ranks: int) -> None:
    """Set the thread count of the scheduler processes, which inherit the environment, unless the user did."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = cores or list(range(os.cpu_count() or 1))
    # One core stays free for the tokenizer and detokenizer: a thread team that loses a core waits for it.
    threads = max(1, min(MAX_DEFAULT_THREADS, (len(cores) - 1) // ranks))
    _default_env("OMP_NUM_THREADS", str(threads))
    if ranks > 1:  # SGLang's default binds a rank to a NUMA node and asserts that there are enough nodes
        teams = (range(rank * threads, (rank + 1) * threads) for rank in range(ranks))
        bind = "|".join(",".join(str(cores[i % len(cores)]) for i in team) for team in teams)
        _default_env("SGLANG_CPU_OMP_THREADS_BIND", bind)


def _default_env(name: str, value: str) -> None:
    if os.environ.get(name) in (None, _env_defaults.get(name)):
        os.environ[name] = _env_defaults[name] = value


def _skip_missing_thread_binding() -> None:
    """Keep SGLang from calling an sgl_kernel op that is not installed, which it does on every ARM64 host."""
    from sglang.srt.distributed import bootstrap

    if not hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env"):
        bootstrap._is_cpu_arm64 = False


def _move_host_tier_by_torch() -> None:
    """Put torch copies in place of the CUDA ones with which SGLang fills and reads its host tier."""
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_sparsespec import hooks
    from sglang_sparsespec.platforms.cpu_host_pool import host_pool_replacements

    hooks.install(
        [
            hooks.Hook(target, HookType.REPLACE, function, "SGLang has this only for devices with a driver")
            for target, function in host_pool_replacements().items()
        ]
    )
