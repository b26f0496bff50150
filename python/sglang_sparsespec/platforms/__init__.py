"""The out-of-tree CPU platform: SGLang's real server on plain torch, for CI and machines without a GPU.

SGLang calls `activate` in every process it starts, so this module imports nothing heavy.
"""

import os

PLATFORM_NAME = "sparsespec_cpu"  # the entry point's name, which SGLANG_PLATFORM selects
_PLATFORM_CLASS = "sglang_sparsespec.platforms.cpu.CpuTorchPlatform"


def activate() -> str | None:
    """Return the dotted name of the platform class where it should serve, else None.

    It serves where SGLANG_PLATFORM=sparsespec_cpu asks for it, and where no accelerator is present. It stays
    out of the way of another SGLANG_PLATFORM and of SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1).

    Raises:
        ValueError: SGLANG_PLATFORM=sparsespec_cpu together with SGLANG_USE_CPU_ENGINE=1.
    """
    asked = os.environ.get("SGLANG_PLATFORM", "")
    in_tree_engine = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if asked == PLATFORM_NAME:
        if in_tree_engine:
            raise ValueError(
                f"SGLANG_PLATFORM={PLATFORM_NAME} and SGLANG_USE_CPU_ENGINE=1 ask for two different CPU "
                f"implementations; unset one of them."
            )
        return _PLATFORM_CLASS
    if asked or in_tree_engine or _accelerator_present():
        return None
    return _PLATFORM_CLASS


def _accelerator_present() -> bool:
    """Whether torch can see a CUDA, ROCm, XPU, NPU, HPU, MPS, MUSA or other out-of-tree device."""
    import torch

    # Not torch.cuda.is_available(): device_count() asks NVML or amdsmi and leaves CUDA uninitialised. It also
    # counts a GPU whose driver is too old, which must stay a visible error and not become a slow CPU server.
    if torch.cuda.device_count() > 0:
        return True
    out_of_tree = torch._C._get_privateuse1_backend_name()
    modules = (getattr(torch, name, None) for name in ("xpu", "npu", "hpu", "mps", "musa", out_of_tree))
    return any(module is not None and module.is_available() for module in modules)
