"""Attention of micro-steps: which implementation serves where."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
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

HALF = (torch.bfloat16, torch.float16)
Capability = tuple[int, int]


@dataclass(frozen=True)
class Needs:
    """What an implementation needs of the machine, of the KV cache and of the model."""

    dtypes: tuple[torch.dtype, ...]  # of the KV cache
    head_dims: tuple[int, ...]
    module: str  # that can be imported
    gpu: str = ""  # in words
    serves: Callable[[Capability], bool] = lambda capability: True
    kernels: bool = True  # whether it runs beside those of sgl-kernel-ext
    fp8_from: Capability = (0, 0)

    def obstacle(self, device: str, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why it cannot serve, or None where it can."""
        if not device.startswith("cuda"):
            return f"it needs a CUDA device, this is {device!r}"
        if self.gpu and not self.serves(torch.cuda.get_device_capability()):
            return f"it needs {self.gpu}, this one is {_version(torch.cuda.get_device_capability())}"
        if dtype not in self.dtypes:
            return f"it needs {_names(self.dtypes)}, the KV cache is {dtype}"
        if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < self.fp8_from:
            here, least = _version(torch.cuda.get_device_capability()), _version(self.fp8_from)
            return f"an fp8 KV cache needs compute capability {least} (the scores do), this one is {here}"
        if head_dim not in self.head_dims:
            return f"it needs a head dimension of {self.head_dims}, this model has {head_dim}"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module} cannot be imported ({error})"
        return kernels_obstacle() if self.kernels else None


def _version(capability: Capability) -> str:
    return "{}.{}".format(*capability)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *most, last = [str(dtype).removeprefix("torch.").removesuffix("fn") for dtype in dtypes]
    return f"{', '.join(most)} or {last}"


NEEDS = {
    "fa3": Needs(
        dtypes=(*HALF, torch.float8_e4m3fn),
        head_dims=(64, 96, 128, 192, 256),
        module="sgl_kernel.flash_attn",
        gpu="a Hopper GPU (compute capability 9.0)",
        serves=lambda capability: capability[0] == 9,
    ),
    "triton": Needs(
        dtypes=(*HALF, torch.float32, torch.float8_e4m3fn),
        head_dims=(64, 128, 256),  # those that the score kernel serves too
        module="triton",
        gpu="an Ampere GPU or later (compute capability 8.0)",
        serves=lambda capability: capability[0] >= 8,
        fp8_from=(8, 9),
    ),
    "flashinfer": Needs(dtypes=HALF, head_dims=(64, 128, 256), module="flashinfer", kernels=False),
}


def obstacle(name: str, device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why attention `name` ("fused", or one of NEEDS) cannot serve, or None where it can."""
    if name != "fused":
        return NEEDS[name].obstacle(device, dtype, head_dim)
    # It falls back on FA3 for what its own kernel does not do.
    if reason := NEEDS["fa3"].obstacle(device, dtype, head_dim):
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
    obstacles = {name: obstacle(name, device, dtype, head_dim) for name in ("fused", *NEEDS)}
    if reason := obstacles.get(asked):
        raise ConfigError(f'attention is "{asked}", but {reason}. Use "auto" or "torch".')
    if asked != "auto":
        return asked, obstacles
    return next((name for name, reason in obstacles.items() if reason is None), "torch"), obstacles


def make_attention(
    config: SparseSpecConfig, runner: Any, req_to_token: torch.Tensor, *, plain: bool = True
) -> MicroStepAttention | PagedAttention:
    """The implementation that `choose_attention` names. Raises ConfigError as it does.

    plain: the model has neither sliding windows nor sinks.
    """
    pool = runner.token_to_kv_pool
    wanted, obstacles = choose_attention(config.attention, str(runner.device), pool.dtype, pool.head_dim)
    if wanted == "flashinfer" and not plain:
        if config.attention == wanted:
            raise ConfigError(
                "attention is 'flashinfer', which serves no sliding windows and no attention sinks here. Use "
                "'auto' or 'torch'."
            )
        wanted = "torch"
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
