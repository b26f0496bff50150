"""Quantised copies of the model's linear layers, which drafts read instead of the weights themselves.

At few requests, and at short contexts, a draft costs what its weights cost to read. Drafts may be wrong, so
they may read 8 or 4 bits a weight where the verification reads 16. The output stays the model's own: every
token still comes from a verification with the full weights, which also overwrites the KV that drafts left
behind. (The idea: QSpec, arXiv 2410.11305; QuantSpec, arXiv 2502.10424, quantises the KV cache as well.)

Codes are symmetric, with a scale for each output and GROUP inputs. On CUDA the product is SGLang's Marlin
kernel; elsewhere a slow reference multiplies by the dequantised weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from sglang_sparsespec import compat

GROUP = 128  # inputs that share a scale
BITS = {"int8": 8, "int4": 4}
# Smaller layers (a router, say) save nothing worth an error.
SMALLEST_ON_CUDA = 1 << 20
# Marlin loses to the 16-bit product where more rows are multiplied than its tiles were made for. Measured on
# an H200, 8B shape, int4: a round of 24 requests takes 0.90 of its time, one of 48 0.99, one of 96 1.26.
MOST_ROWS = 32
# A scale below the one that holds the largest weight clips it, and rounds all others finer.
SHRINKS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}
SAMPLE = 4096  # elements of a weight that are compared to see whether it was changed


class DraftWeightsError(RuntimeError):
    """Quantised drafts were asked for and cannot be had; the text says why and what to do."""


def quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes with one scale for each output and GROUP inputs.

    Args:
        weight: [N, K], K a multiple of GROUP.
        bits: 4 or 8.

    Returns:
        codes: [N, K] uint8, weight / scale + 2 ** (bits - 1). scales: [N, K / GROUP] of the weight's dtype.
    """
    half = 1 << (bits - 1)
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    peak = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    best = torch.full_like(peak, float("inf"))
    scales = torch.empty_like(peak)
    for shrink in SHRINKS[bits]:
        # Rounded first: the codes must fit the scale that the product will use.
        tried = (peak * (shrink / (half - 1))).to(weight.dtype).float()
        error = (_round(groups, tried, half) * tried - groups).square().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried, scales)
    codes = (_round(groups, scales, half) + half).to(torch.uint8)
    return codes.view(outputs, inputs), scales.squeeze(-1).to(weight.dtype)


def _round(groups: torch.Tensor, scales: torch.Tensor, half: int) -> torch.Tensor:
    return (groups / scales).round().clamp(-half, half - 1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights that codes stand for, [N, K] of the scales' dtype."""
    values = codes.float() - (1 << (bits - 1))
    return (values.view(*scales.shape, GROUP) * scales.float()[..., None]).view(codes.shape).to(scales.dtype)


class DraftLinear(Protocol):
    """x [T, K] times a quantised weight: [T, N]. `load` replaces the weight and keeps its tensors' places."""

    nbytes: int

    def load(self, weight: torch.Tensor) -> None: ...

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


class ReferenceLinear:
    """The slow, obvious one, for any device: it saves neither memory nor time."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self._bits = bits
        self._weight = torch.empty_like(weight)
        self.nbytes = weight.nbytes
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        self._weight.copy_(dequantise(*quantise(weight, self._bits), self._bits))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, bias)


class MarlinLinear:
    """SGLang's Marlin kernel: bf16 or fp16 activations, 8- or 4-bit weights, sums in float32."""

    def __init__(self, weight: torch.Tensor, bits: int, kernel: compat.Marlin) -> None:
        self._bits, self._kernel = bits, kernel
        self._outputs = weight.shape[0]
        self._codes, self._scales = self._pack(weight)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantise(weight, self._bits)
        return self._kernel.pack(codes, scales, bits=self._bits, group=GROUP)

    def load(self, weight: torch.Tensor) -> None:
        # In place: captured graphs hold the addresses.
        codes, scales = self._pack(weight)
        self._codes.copy_(codes)
        self._scales.copy_(scales)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = self._kernel.multiply(flat, self._codes, self._scales, bits=self._bits, outputs=self._outputs)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], self._outputs)


class DraftWeights:
    """Quantised copies of a loaded model's linear layers, in use inside `active()` and only there.

    Args:
        model: the served model. Layers whose weights are quantised already, are small, or have a shape that
            the kernel lacks keep their own weights.
        kind: "int8" or "int4".

    Raises:
        DraftWeightsError: the kernel cannot be built here, or the model has no layer to quantise.
    """

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.kind, self.bits = kind, BITS[kind]
        self._active = False
        self._layers: list[tuple[torch.nn.Module, DraftLinear, torch.Tensor]] = []
        kernel: compat.Marlin | None = None
        for layer in compat.plain_linears(model):
            weight = layer.weight.data
            if weight.shape[0] % 64 or weight.shape[1] % GROUP or weight.shape[1] < 2 * GROUP:
                continue
            linear: DraftLinear
            if weight.is_cuda:
                if weight.numel() < SMALLEST_ON_CUDA or weight.dtype not in (torch.bfloat16, torch.float16):
                    continue
                kernel = kernel or self._load_kernel(weight)
                linear = MarlinLinear(weight, self.bits, kernel)
            else:
                linear = ReferenceLinear(weight, self.bits)
            self._layers.append((layer, linear, _sample(weight)))
            compat.wrap_linear(layer, self._instead_of(linear))
        if not self._layers:
            raise DraftWeightsError(
                f"draft_weights is {kind!r}, but this model has no linear layer to quantise: all are "
                "quantised already, smaller than a million weights, or not float16 or bfloat16. Set it to "
                '"model".'
            )

    def _load_kernel(self, weight: torch.Tensor) -> compat.Marlin:
        try:
            return compat.Marlin(weight.device, weight.dtype)
        except Exception as error:  # a compiler's, a linker's or an import's: none of them is ours to list
            raise DraftWeightsError(
                f"draft_weights is {self.kind!r}, but SGLang's Marlin kernel cannot be built here: {error}. "
                'It needs the CUDA toolkit (nvcc) and ninja. Install them, or set draft_weights to "model".'
            ) from error

    def _instead_of(self, linear: DraftLinear) -> Any:
        def apply(own: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return linear(x, bias) if self._active else own(x, bias)

        return apply

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for _, linear, _ in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @contextlib.contextmanager
    def active(self, *, rows: int) -> Iterator[None]:
        """Run the model on the copies, where that pays for so many draft rows; what is captured stays so."""
        if rows > MOST_ROWS:
            yield
            return
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def refresh(self) -> int:
        """Quantise anew the layers whose weights were changed since (RL updates). Returns how many were."""
        changed = 0
        for at, (layer, linear, sample) in enumerate(self._layers):
            now = _sample(layer.weight.data)
            if not torch.equal(now, sample):
                linear.load(layer.weight.data)
                self._layers[at] = (layer, linear, now)
                changed += 1
        return changed


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Elements spread over a weight: an update that leaves them all equal is not worth a new copy."""
    flat = weight.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()
