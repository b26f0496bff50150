"""Attention of micro-steps: which implementation serves where."""

from __future__ import annotations

from typing import Any

import torch

from sglang_sparsespec.attention.interface import MicroStepAttention
from sglang_sparsespec.config import ConfigError, SparseSpecConfig

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


def make_attention(config: SparseSpecConfig, runner: Any, req_to_token: torch.Tensor) -> MicroStepAttention:
    """The implementation that `config.attention` asks for, or the best one here.

    Raises:
        ConfigError: FlashInfer is asked for by name and cannot serve this model on this device.
    """
    pool = runner.token_to_kv_pool
    obstacle = flashinfer_obstacle(str(runner.device), pool.dtype, pool.head_dim)
    if config.attention == "flashinfer" and obstacle:
        raise ConfigError(f'attention is "flashinfer", but {obstacle}. Use "auto" or "torch".')
    if config.attention != "torch" and obstacle is None:
        from sglang_sparsespec.attention.flashinfer import FlashInferAttention

        heads = next(m.tp_q_head_num for m in runner.model.modules() if hasattr(m, "tp_q_head_num"))
        return FlashInferAttention(
            req_to_token, heads=heads, kv_heads=pool.head_num, head_dim=pool.head_dim, dtype=pool.dtype
        )
    from sglang_sparsespec.attention.torch_reference import TorchAttention

    return TorchAttention(req_to_token)
