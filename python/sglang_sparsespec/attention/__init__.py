"""Attention of micro-steps: which implementation serves where."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_sparsespec.attention.interface import MicroStepAttention
from sglang_sparsespec.attention.paged import PagedAttention
from sglang_sparsespec.config import ConfigError, SparseSpecConfig
from sglang_sparsespec.rounds.kernels import kernels_obstacle

logger = logging.getLogger(__name__)

FA3_DTYPES = (torch.bfloat16, torch.float16)
FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
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
        return f"it needs bfloat16 or float16, the KV cache is {dtype}"
    if head_dim not in FA3_HEAD_DIMS:
        return f"it needs a head dimension of {FA3_HEAD_DIMS}, this model has {head_dim}"
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except ImportError as error:
        return f"sgl_kernel cannot be imported ({error})"
    return kernels_obstacle()


def make_attention(
    config: SparseSpecConfig, runner: Any, req_to_token: torch.Tensor
) -> MicroStepAttention | PagedAttention:
    """The implementation that `config.attention` asks for, or the best one here: FA3 with CUDA graphs, then
    FlashInfer, then plain torch.

    Raises:
        ConfigError: one is asked for by name and cannot serve this model on this device.
    """
    pool = runner.token_to_kv_pool
    where = (str(runner.device), pool.dtype, pool.head_dim)
    obstacles = {"fa3": fa3_obstacle(*where), "flashinfer": flashinfer_obstacle(*where)}
    wanted = config.attention
    if reason := obstacles.get(wanted):
        raise ConfigError(f'attention is "{wanted}", but {reason}. Use "auto" or "torch".')
    if wanted == "auto":
        wanted = next((name for name, reason in obstacles.items() if reason is None), "torch")
        if wanted != "fa3" and where[0].startswith("cuda"):
            logger.warning(
                "SPARSESPEC runs without CUDA graphs (slow), on attention %s: FA3 cannot be used: %s.",
                wanted,
                obstacles["fa3"],
            )
    if wanted == "fa3":
        from sglang_sparsespec.attention.fa3 import FA3Attention

        return FA3Attention()
    if wanted == "flashinfer":
        from sglang_sparsespec.attention.flashinfer import FlashInferAttention

        heads = next(m.tp_q_head_num for m in runner.model.modules() if hasattr(m, "tp_q_head_num"))
        return FlashInferAttention(
            req_to_token, heads=heads, kv_heads=pool.head_num, head_dim=pool.head_dim, dtype=pool.dtype
        )
    if wanted == "torch_paged":
        from sglang_sparsespec.attention.paged_reference import TorchPagedAttention

        return TorchPagedAttention()
    from sglang_sparsespec.attention.torch_reference import TorchAttention

    return TorchAttention(req_to_token)
