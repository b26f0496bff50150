"""Attention of micro-steps: which implementation serves where."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_sparsespec.attention.interface import MicroStepAttention
from sglang_sparsespec.attention.paged import PagedAttention
from sglang_sparsespec.config import ConfigError, SparseSpecConfig
from sglang_sparsespec.rounds.kernels import kernels_obstacle

if TYPE_CHECKING:
    from sglang_sparsespec.attention.fused import FusedAttention

logger = logging.getLogger(__name__)

GRAPHED = ("fused", "fa3", "triton")  # implementations that run in CUDA graphs

FA3_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
TRITON_HEAD_DIMS = (64, 128, 256)  # those that the score kernel serves too
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def flashinfer_obstacle(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot serve, or None where it can."""
    if not device.startswith("cuda"):
        return f"it needs a CUDA device, this is {device!r}"
    if dtype not in FLASHINFER_DTYPES:
        return f"it needs bfloat16 or float16, the KV cache is {dtype}"
    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it needs a head dimension of {FLASHINFER_HEAD_DIMS}, this model has {head_dim}"
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"it is not installed ({error})"
    return None


def fa3_obstacle(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention 3 with CUDA graphs cannot serve, or None where it can."""
    if not device.startswith("cuda"):
        return f"it needs a CUDA device, this is {device!r}"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"it needs a Hopper GPU (compute capability 9.0), this one is {major}.{minor}"
    if dtype not in FA3_DTYPES:
        return f"it needs bfloat16, float16 or fp8_e4m3, the KV cache is {dtype}"
    if head_dim not in FA3_HEAD_DIMS:
        return f"it needs a head dimension of {FA3_HEAD_DIMS}, this model has {head_dim}"
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ImportError as error:
        return f"sgl_kernel cannot be imported ({error})"
    return kernels_obstacle()


def triton_obstacle(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the Triton kernels with CUDA graphs cannot serve, or None where they can."""
    if not device.startswith("cuda"):
        return f"it needs a CUDA device, this is {device!r}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"it needs an Ampere GPU or later (compute capability 8.0), this one is {major}.{minor}"
    if dtype not in TRITON_DTYPES:
        return f"it needs bfloat16, float16, float32 or fp8_e4m3, the KV cache is {dtype}"
    if dtype == torch.float8_e4m3fn and (major, minor) < (8, 9):
        return f"an fp8 KV cache needs compute capability 8.9 (the scores do), this one is {major}.{minor}"
    if head_dim not in TRITON_HEAD_DIMS:
        return f"it needs a head dimension of {TRITON_HEAD_DIMS}, this model has {head_dim}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return kernels_obstacle()


def fused_obstacle(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why verifications cannot score their keys themselves, or None where they can."""
    if reason := fa3_obstacle(device, dtype, head_dim):
        return reason
    from sgl_kernel_ext.cuda import supported

    return supported(head_dim, 1, 1, dtype, device)


def query_heads(model: torch.nn.Module) -> int:
    """Query heads of an attention layer on this rank."""
    return next(m.tp_q_head_num for m in model.modules() if hasattr(m, "tp_q_head_num"))


def choose_attention(
    asked: str, device: str, dtype: torch.dtype, head_dim: int
) -> tuple[str, dict[str, str | None]]:
    """Which implementation serves: the one asked for, or the best of fused, fa3 and triton (CUDA graphs),
    flashinfer and torch.

    Returns:
        its name, and why each of the fast ones cannot serve (None: it can).

    Raises:
        ConfigError: one is asked for by name and cannot serve this model on this device.
    """
    where = (device, dtype, head_dim)
    obstacles = {
        "fused": fused_obstacle(*where),
        "fa3": fa3_obstacle(*where),
        "triton": triton_obstacle(*where),
        "flashinfer": flashinfer_obstacle(*where),
    }
    if reason := obstacles.get(asked):
        raise ConfigError(f'attention is "{asked}", but {reason}. Use "auto" or "torch".')
    if asked != "auto":
        return asked, obstacles
    return next((name for name, reason in obstacles.items() if reason is None), "torch"), obstacles


def make_attention(
    config: SparseSpecConfig, runner: Any, req_to_token: torch.Tensor
) -> MicroStepAttention | PagedAttention:
    """The implementation that `choose_attention` names. Raises ConfigError as it does."""
    pool = runner.token_to_kv_pool
    wanted, obstacles = choose_attention(config.attention, str(runner.device), pool.dtype, pool.head_dim)
    if config.attention == "auto" and wanted not in GRAPHED and str(runner.device).startswith("cuda"):
        logger.warning(
            "SPARSESPEC runs without CUDA graphs (slow), on attention %s: FA3 cannot be used: %s; "
            "nor can Triton: %s.",
            wanted,
            obstacles["fa3"],
            obstacles["triton"],
        )
    if pool.dtype == torch.float8_e4m3fn and wanted not in ("fa3", "triton"):
        raise ConfigError(
            f"the KV cache is fp8_e4m3, which only attention fa3 and triton read, but {wanted} serves here "
            f"(fa3: {obstacles['fa3']}; triton: {obstacles['triton']}). Leave --kv-cache-dtype out."
        )
    if wanted == "fused":
        fused = _make_fused(config, runner)
        if fused is not None:
            return fused
        wanted = "fa3"
    if wanted == "fa3":
        from sglang_sparsespec.attention.fa3 import FA3Attention

        return FA3Attention()
    if wanted == "triton":
        from sglang_sparsespec.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention()
    if wanted == "flashinfer":
        from sglang_sparsespec.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(
            req_to_token,
            heads=query_heads(runner.model),
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            dtype=pool.dtype,
        )
    if wanted == "torch_paged":
        from sglang_sparsespec.attention.paged_reference import TorchPagedAttention

        return TorchPagedAttention()
    from sglang_sparsespec.attention.torch_reference import TorchAttention

    return TorchAttention(req_to_token)


def _make_fused(config: SparseSpecConfig, runner: Any) -> FusedAttention | None:
    """The fused attention, or None where it is not asked for by name and its kernel does not compile."""
    from sglang_sparsespec.attention.fused import FusedAttention

    pool = runner.token_to_kv_pool
    try:
        return FusedAttention(
            heads=query_heads(runner.model),
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            queries=config.stride + 1,
            device=runner.device,
        )
    except (RuntimeError, ValueError) as error:
        if config.attention == "fused":
            raise ConfigError(f'attention is "fused", but {error}. Use "auto" or "fa3".') from None
        logger.warning("SPARSESPEC scores in a pass of its own: the fused kernel cannot run: %s", error)
        return None
