"""The kernels of the CUDA-graph path, as one bundle: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_sparsespec.config import ConfigError

MISSING = (
    "package sgl-kernel-ext is not installed, which holds the kernels of the CUDA-graph path. "
    "Install it (pip install sgl-kernel-ext, or ./sgl-kernel-ext from the repository)"
)


@dataclass(frozen=True)
class RoundKernels:
    """What a micro-step launches besides the model. `sgl_kernel_ext` documents each."""

    name: str
    prepare: Callable[..., Any]
    draft_pages: Callable[..., Any]
    verify_pages: Callable[..., Any]
    settle: Callable[..., Any]
    finish_greedy: Callable[..., Any]
    look_up: Callable[..., Any]
    score_keys: Callable[..., Any]
    select: Callable[..., Any]


def kernels_obstacle() -> str | None:
    """Why the kernels cannot be had here, or None."""
    try:
        import sgl_kernel_ext  # noqa: F401
    except ImportError:
        return MISSING
    return None


def load_kernels(device: str) -> RoundKernels:
    """The kernels for `device`. Raises ConfigError when the package that holds them is missing."""
    if reason := kernels_obstacle():
        raise ConfigError(f"the CUDA-graph path cannot run: {reason}.")
    if device.startswith("cuda"):
        from sgl_kernel_ext import rounds
        from sgl_kernel_ext.score import score_keys
        from sgl_kernel_ext.select import select

        name = "triton"
    else:
        from sgl_kernel_ext import rounds_reference as rounds
        from sgl_kernel_ext.rounds_reference import score_keys, select

        name = "torch"
    return RoundKernels(
        name,
        rounds.prepare,
        rounds.draft_pages,
        rounds.verify_pages,
        rounds.settle,
        rounds.finish_greedy,
        rounds.look_up,
        score_keys,
        select,
    )
