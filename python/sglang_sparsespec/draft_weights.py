"""Quantised copies of the model's linear layers, which drafts read instead of the weights themselves.

Most of a draft's time goes into reading its weights. Drafts may be wrong, so they may read 8 or 4 bits a
weight where the verification reads 16. The output stays the model's own: every token still comes from a
verification with the full weights, which also overwrites the KV that drafts left behind. (The idea: QSpec,
arXiv 2410.11305; QuantSpec, arXiv 2502.10424, quantises the KV cache as well.)

Integer codes are symmetric, with a scale for each output and GROUP inputs, and multiply activations as they
are (our own kernel for up to 16 rows and 4 bits on Hopper, SGLang's Marlin kernel otherwise). 8-bit floating
point has a scale for each output and another for each row of activations, which are rounded too (SGLang's
CUTLASS kernel). Where there is no CUDA device, slow references do the same sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from sglang_sparsespec import compat

GROUP = 128  # inputs that share a scale of integer codes
# Smaller layers (a router, say) save nothing worth an error.
SMALLEST_ON_CUDA = 1 << 20
# Marlin loses to the 16-bit product where more rows are multiplied than its tiles were made for. Measured on
# an H200, 8B shape, int4: a round of 24 requests takes 0.90 of its time, one of 48 0.99, one of 96 1.26.
MARLIN_ROWS = 32
# Up to here 4 bits beat 8-bit floating point.
INT4_ROWS = 16
ANY_ROWS = 1 << 30
FP8_FROM = (8, 9)  # compute capability
# Beyond so many rows the product is faster where they are a multiple of the step: on an H200 those of a layer
# of the 8B shape take 67 us with 40 rows, 63 with 48.
FP8_ANY_ROWS, FP8_ROW_STEP = 32, 16
FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# A scale below the one that holds the largest weight clips it, and rounds all others finer.
SHRINKS = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8)}
PART = 1 << 25  # elements that are quantised at a time
SAMPLE = 4096  # elements of a weight that are compared to see whether it was changed


@dataclass(frozen=True)
class Tier:
    """A format, and the most draft rows that it serves."""

    format: str  # int8, int4 or fp8
    rows: int = ANY_ROWS


# What `draft_weights` may be. A kernel may serve fewer rows than its tier; drafts of more rows than the last
# tier serves read the model's own weights.
TIERS = {
    "int8": (Tier("int8"),),
    "int4": (Tier("int4"),),
    "fp8": (Tier("fp8"),),
    "int4+fp8": (Tier("int4", INT4_ROWS), Tier("fp8")),
}
BITS = {"int8": 8, "int4": 4}


class DraftWeightsError(RuntimeError):
    """Quantised drafts were asked for and cannot be had; the text says why and what to do."""


def _in_parts(
    quantised: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised` some outputs at a time: it takes several times the memory of what it is given."""
    parts = [quantised(part) for part in weight.split(max(1, PART // weight.shape[1]))]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes with one scale for each output and GROUP inputs.

    Args:
        weight: [N, K], K a multiple of GROUP.
        bits: 4 or 8.

    Returns:
        codes: [N, K] uint8, weight / scale + 2 ** (bits - 1). scales: [N, K / GROUP] of the weight's dtype.
    """
    return _in_parts(partial(_quantise, bits=bits), weight)


def _quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] float8_e4m3fn and scales [N] float32 of a weight [N, K]: one scale for each output."""
    return _in_parts(_quantise_fp8, weight)


def _quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.float().abs().amax(dim=1).clamp_min(1e-12) / FP8_LARGEST
    codes = (weight.float() / scales[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST)
    return codes.to(torch.float8_e4m3fn), scales


class DraftLinear(Protocol):
    """x [T, K] times a quantised weight: [T, N]. `load` replaces the weight and keeps its tensors' places."""

    nbytes: int
    most_rows: int  # that it serves well

    def load(self, weight: torch.Tensor) -> None: ...

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


class ReferenceLinear:
    """The slow, obvious one, for any device: it saves neither memory nor time."""

    most_rows = MARLIN_ROWS

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self._bits = bits
        self._weight = torch.empty_like(weight)
        self.nbytes = weight.nbytes
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        self._weight.copy_(dequantise(*quantise(weight, self._bits), self._bits))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, bias)


class PackedLinear:
    """What the kernels have in common: a weight as codes and scales, which a new weight replaces in place."""

    most_rows = ANY_ROWS

    def __init__(self, weight: torch.Tensor) -> None:
        self._codes, self._scales = self._pack(weight)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def load(self, weight: torch.Tensor) -> None:
        # In place: captured graphs hold the addresses.
        codes, scales = self._pack(weight)
        self._codes.copy_(codes)
        self._scales.copy_(scales)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._multiply(x.reshape(-1, x.shape[-1]), bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight: [T, N]."""
        raise NotImplementedError


class MarlinLinear(PackedLinear):
    """SGLang's Marlin kernel: bf16 or fp16 activations, 8- or 4-bit weights, sums in float32."""

    most_rows = MARLIN_ROWS

    def __init__(self, weight: torch.Tensor, bits: int, kernel: compat.Marlin) -> None:
        self._bits, self._kernel = bits, kernel
        self._outputs = weight.shape[0]
        super().__init__(weight)

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantise(weight, self._bits)
        return self._kernel.pack(codes, scales, bits=self._bits, group=GROUP)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._kernel.multiply(x, self._codes, self._scales, bits=self._bits, outputs=self._outputs)
        return out if bias is None else out.add_(bias)


class FewRowsLinear(PackedLinear):
    """Our kernel for 4-bit weights and few rows of bf16 activations on Hopper, sums in float32."""

    most_rows = INT4_ROWS

    def __init__(self, weight: torch.Tensor) -> None:
        from sgl_kernel_ext.few_rows import tune

        super().__init__(weight)
        self._variants = tune(self._codes, self._scales)

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from sgl_kernel_ext.few_rows import pack

        return pack(*quantise(weight, 4))

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from sgl_kernel_ext.few_rows import multiply

        return multiply(x, self._codes, self._scales, bias, variants=self._variants)


class ReferenceFp8Linear:
    """Weights and activations rounded to 8-bit floating point, on any device; it saves nothing."""

    most_rows = ANY_ROWS

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.empty_like(weight)
        self.nbytes = weight.nbytes
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        codes, scales = quantise_fp8(weight)
        self._weight.copy_(codes.float() * scales[:, None])

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        codes, scales = quantise_fp8(flat)
        rounded = (codes.float() * scales[:, None]).to(x.dtype).view(x.shape)
        return torch.nn.functional.linear(rounded, self._weight, bias)


class Fp8Linear(PackedLinear):
    """SGLang's product of 8-bit floating point: a scale for each row and each output, sums in float32."""

    def _pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise_fp8(weight)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from sgl_kernel_ext.row_quant import quantise_rows

        rows = len(x)
        padded = rows if rows <= FP8_ANY_ROWS else -(-rows // FP8_ROW_STEP) * FP8_ROW_STEP
        codes, scales = quantise_rows(x.contiguous(), padded=padded)
        out = compat.multiply_fp8(codes, self._codes, scales, self._scales, dtype=x.dtype, bias=bias)
        return out[:rows]


class Quantiser:
    """Makes quantised copies of weights for one kind of `draft_weights`, and loads the kernels they need."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._marlin: compat.Marlin | None = None

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether there is a kernel for this shape and type of weight, and it is worth having."""
        outputs, inputs = weight.shape
        if outputs % 64 or inputs % GROUP or inputs < 2 * GROUP:
            return False
        half = weight.dtype in (torch.bfloat16, torch.float16)
        return not weight.is_cuda or (half and weight.numel() >= SMALLEST_ON_CUDA)

    def copy(self, weight: torch.Tensor, form: str) -> DraftLinear:
        """A copy of `weight` in a format of `Tier`. Raises DraftWeightsError where its kernel is missing."""
        if form == "fp8":
            if not weight.is_cuda:
                return ReferenceFp8Linear(weight)
            self._check_fp8(torch.cuda.get_device_capability(weight.device))
            return Fp8Linear(weight)
        if not weight.is_cuda:
            return ReferenceLinear(weight, BITS[form])
        if form == "int4" and self._few_rows_serve(weight):
            return FewRowsLinear(weight)
        self._marlin = self._marlin or self._load_marlin(weight)
        return MarlinLinear(weight, BITS[form], self._marlin)

    def output_format(self, weight: torch.Tensor) -> str:
        """The format of the output matrix: 8 bits, in floating point where there are products of it."""
        if self.kind == "int8":
            return "int8"
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FP8_FROM:
            return "int8"
        return "fp8"

    def _few_rows_serve(self, weight: torch.Tensor) -> bool:
        try:
            from sgl_kernel_ext.few_rows import supported
        except ImportError:
            return False
        return supported(weight.dtype, *weight.shape, weight.device) is None

    def _check_fp8(self, capability: tuple[int, int]) -> None:
        if capability < FP8_FROM:
            raise DraftWeightsError(
                f"draft_weights is {self.kind!r}, but this GPU (compute capability {capability[0]}."
                f"{capability[1]}) has no products of 8-bit floating point, which begin with 8.9 (Ada, "
                'Hopper). Use "int4", "int8" or "model".'
            )

    def _load_marlin(self, weight: torch.Tensor) -> compat.Marlin:
        try:
            return compat.Marlin(weight.device, weight.dtype)
        except Exception as error:  # a compiler's, a linker's or an import's: none of them is ours to list
            raise DraftWeightsError(
                f"draft_weights is {self.kind!r}, but SGLang's Marlin kernel cannot be built here: {error}. "
                'It needs the CUDA toolkit (nvcc) and ninja. Install them, or set draft_weights to "fp8" or '
                '"model".'
            ) from error


@dataclass
class _Layer:
    module: torch.nn.Module
    copies: list[DraftLinear]  # one for each tier
    sample: torch.Tensor


class DraftWeights:
    """Quantised copies of a loaded model's linear layers, in use inside `active()` and only there.

    Args:
        model: the served model. Layers whose weights are quantised already, are small, or have a shape that
            the kernels lack keep their own weights.
        kind: of TIERS.

    Raises:
        DraftWeightsError: a kernel cannot be had here, or the model has no layer to quantise.
    """

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.kind, self.tiers = kind, TIERS[kind]
        self._active: int | None = None  # the tier in use
        self._layers: list[_Layer] = []
        quantiser = Quantiser(kind)
        for module in compat.plain_linears(model):
            if quantiser.fits(module.weight.data):
                copies = [quantiser.copy(module.weight.data, tier.format) for tier in self.tiers]
                self._layers.append(_Layer(module, copies, _sample(module.weight.data)))
                compat.wrap_linear(module, self._instead_of(copies))
        head = compat.plain_output_layer(model)
        if self._layers and head is not None and quantiser.fits(head.weight.data):
            # 4 bits would tell near tokens apart badly; one copy of 8 serves all tiers.
            copies = [quantiser.copy(head.weight.data, quantiser.output_format(head.weight.data))] * len(
                self.tiers
            )
            self._layers.append(_Layer(head, copies, _sample(head.weight.data)))
            compat.wrap_output_layer(model, self._instead_of_output(copies))
        # A layer's shape decides its kernel; all serve what the least of them serves.
        self._rows = [
            min([tier.rows, *(layer.copies[at].most_rows for layer in self._layers)])
            for at, tier in enumerate(self.tiers)
        ]
        if not self._layers:
            raise DraftWeightsError(
                f"draft_weights is {kind!r}, but this model has no linear layer to quantise: all are "
                "quantised already, smaller than a million weights, or not float16 or bfloat16. Set it to "
                '"model".'
            )

    def _instead_of(self, copies: list[DraftLinear]) -> Any:
        def apply(own: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return own(x, bias) if self._active is None else copies[self._active](x, bias)

        return apply

    def _instead_of_output(self, copies: list[DraftLinear]) -> Any:
        def apply(own: Any, hidden: torch.Tensor) -> torch.Tensor:
            return own() if self._active is None else copies[self._active](hidden, None)

        return apply

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for layer in self._layers for copy in set(layer.copies))

    def __len__(self) -> int:
        return len(self._layers)

    @contextlib.contextmanager
    def active(self, *, rows: int) -> Iterator[None]:
        """Run the model on the copies, where that pays for so many draft rows; what is captured stays so."""
        self._active = next((at for at, most in enumerate(self._rows) if rows <= most), None)
        try:
            yield
        finally:
            self._active = None

    def refresh(self) -> int:
        """Quantise anew the layers whose weights were changed since (RL updates). Returns how many were."""
        changed = 0
        for layer in self._layers:
            weight = layer.module.weight.data
            now = _sample(weight)
            if not torch.equal(now, layer.sample):
                for copy in set(layer.copies):
                    copy.load(weight)
                layer.sample = now
                changed += 1
        return changed


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Elements spread over a weight: an update that leaves them all equal is not worth a new copy."""
    flat = weight.reshape(-1)
    # An even step may be a multiple of the row, and would see one column only.
    return flat[:: max(1, flat.numel() // SAMPLE) | 1].clone()
