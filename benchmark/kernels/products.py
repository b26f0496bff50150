"""Products of a layer's weights with the rows of a draft: 16 bits, and the copies of `draft_weights`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention import Case, Launch, NotHereError

# Outputs and inputs of the four products of a layer: QKV, attention's output, gate and up, down.
LAYER = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
SMOKE_LAYER = ((128, 256), (64, 256))
ROWS = (1, 8, 16, 24, 48, 96)
SMOKE_ROWS = (2,)
COPIES = 3  # launches take turns: one layer's 4-bit weights would stay in L2
TOLERANCE = {"16 bits": 0.01, "SGLang fp8": 0.06, "SGLang Marlin int4": 0.15, "ours int4": 0.15}
BITS = {"16 bits": 16, "SGLang fp8": 8, "SGLang Marlin int4": 4, "ours int4": 4}

Linear = Callable[[torch.Tensor], torch.Tensor]


@functools.cache
def weights(shape: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(4)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = [torch.randn(shape, generator=generator, device=device) * 0.02 for _ in range(COPIES)]
    return [weight.to(dtype) for weight in made]


@functools.cache
def linears(kernel: str, shape: tuple[int, int], device: torch.device) -> list[Linear]:
    """One product for each of `weights`. Raises NotHereError or ImportError where there is no kernel."""
    own = weights(shape, device)
    if kernel == "16 bits":
        return [functools.partial(torch.nn.functional.linear, weight=weight) for weight in own]
    if device.type != "cuda":
        raise NotHereError("needs a CUDA device")
    sys.path.append(str(Path(__file__).parents[2] / "python"))  # an installed package wins
    from sglang_sparsespec import compat, draft_weights

    if kernel == "SGLang fp8":
        made = [draft_weights.Fp8Linear(weight) for weight in own]
    elif kernel == "ours int4":
        from sgl_kernel_ext.few_rows import supported

        if reason := supported(own[0].dtype, *shape, device):
            raise NotHereError(reason)
        made = [draft_weights.FewRowsLinear(weight) for weight in own]
    else:
        marlin = compat.Marlin(device, own[0].dtype)
        made = [draft_weights.MarlinLinear(weight, 4, marlin) for weight in own]
    return [functools.partial(linear, bias=None) for linear in made]


def layer(kernel: str, shapes: tuple[tuple[int, int], ...], rows: int, device: torch.device) -> Launch:
    """All products of a layer, one after the other."""
    if kernel == "ours int4" and rows > 16:
        raise NotHereError("serves up to 16 rows")
    made = [linears(kernel, shape, device) for shape in shapes]
    inputs = [
        torch.randn(rows, shape[1], device=device).to(weights(shape, device)[0].dtype) for shape in shapes
    ]

    def launch(i: int) -> None:
        for x, one in zip(inputs, made, strict=True):
            one[i % COPIES](x)

    for x, one, shape in zip(inputs, made, shapes, strict=True):
        want = x.float() @ weights(shape, device)[0].float().T
        error = float((one[0](x).float() - want).norm() / want.norm())
        if not error < TOLERANCE[kernel]:
            raise ValueError(f"wrong result: {shape} is off by {error:.3f} of its norm")
    return launch


def product_cases(device: torch.device, *, smoke: bool) -> Iterator[Case]:
    shapes, sizes = (SMOKE_LAYER, SMOKE_ROWS) if smoke else (LAYER, ROWS)
    count = sum(outputs * inputs for outputs, inputs in shapes)
    for rows in sizes:
        for kernel, bits in BITS.items():
            make = functools.partial(layer, kernel, shapes, rows, device)
            yield Case("product", f"layer, {rows} rows", kernel, count * bits // 8, make)
