"""Rows of activations in 8-bit floating point, for products with 8-bit weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_PEAK = 1e-12  # a row of zeros has this peak


@triton.jit
def _quantise_row(x, codes, scales, width, LARGEST: tl.constexpr, PEAK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values)), PEAK)
    # Clamped: the quotient may round above what the format holds, and that is NaN.
    scaled = tl.clamp(values * (LARGEST / peak), -LARGEST, LARGEST)
    tl.store(codes + row * width + at, scaled.to(tl.float8e4nv), mask=at < width)
    tl.store(scales + row, peak / LARGEST)


def quantise_rows(x: torch.Tensor, *, padded: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each row, such that its largest value is the largest that float8_e4m3fn holds.

    Args:
        x: [T, K], contiguous, of a floating type.
        padded: rows of the result; those beyond T hold anything, NaN too. T by default.

    Returns:
        codes: [padded, K] float8_e4m3fn. scales: [padded, 1] float32; codes * scales is x, to 3 bits of
        mantissa.
    """
    rows, width = x.shape
    total = rows if padded is None else padded
    codes = torch.empty(total, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(total, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 1024))
        _quantise_row[(rows,)](x, codes, scales, width, LARGEST, SMALLEST_PEAK, block, num_warps=warps)
    return codes, scales
