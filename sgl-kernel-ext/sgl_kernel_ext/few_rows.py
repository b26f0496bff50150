"""Products of a few rows of activations with 4-bit weights, on Hopper: out = x . W^T.

    reason = supported(torch.bfloat16, outputs, inputs, device)  # None: go ahead
    codes, scales = pack(codes, scales)
    variants = tune(codes, scales)
    out = multiply(x, codes, scales, variants=variants)

The first call compiles the kernels with nvcc (see `cuda_build`). Sources: csrc/few_rows.cuh.
"""

from __future__ import annotations

import functools

import torch

from sgl_kernel_ext import cuda_build

MOST_ROWS = 16
GROUP = 128  # inputs that share a scale
TILE = 32  # outputs of a CTA
ROWS = (8, 16)  # the kernel computes as many columns, however few of them are there
VARIANTS = 8
DEFAULT_VARIANTS = (6, 6)
RUNS = 7
FLUSH_BYTES = 256 << 20
# Where the 8 codes of a word stand in it: pairs of neighbours 16 bits apart.
LOW, HIGH = [0, 4, 1, 5], [2, 6, 3, 7]


def supported(dtype: torch.dtype, outputs: int, inputs: int, device: torch.device | str) -> str | None:
    """Why the kernel cannot serve such weights on this device, or None if it can. Compiles nothing."""
    device = torch.device(device)
    if dtype != torch.bfloat16:
        return f"dtype is {dtype}, allowed: torch.bfloat16"
    if outputs % TILE or inputs % GROUP:
        return f"weights are [{outputs}, {inputs}], needed: multiples of {TILE} and {GROUP}"
    return cuda_build.missing(device, tvm=True)


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as the kernel reads them.

    Args:
        codes: [N, K] uint8, 0 to 15; 8 stands for zero. scales: [N, K / GROUP] bfloat16.

    Returns:
        uint8 [N * K / 2] and bfloat16 [K / GROUP, N].
    """
    outputs, inputs = codes.shape
    # [tile, half, output, block, quarter, word, code] -> [tile, block, half, output, quarter, word, code]
    pieces = codes.view(outputs // 16, 2, 8, inputs // GROUP, 4, 4, 8).permute(0, 3, 1, 2, 4, 5, 6)
    packed = pieces[..., LOW] | pieces[..., HIGH] << 4
    return packed.contiguous().view(-1), scales.t().contiguous()


@functools.cache
def _fastest(outputs: int, inputs: int, device: torch.device) -> tuple[int, ...]:
    codes = torch.zeros(outputs * inputs // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(inputs // GROUP, outputs, dtype=torch.bfloat16, device=device)
    # Weights come from memory, as they do in a model, and not from the cache.
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    fastest = []
    for rows in ROWS:
        x = torch.zeros(rows, inputs, dtype=torch.bfloat16, device=device)
        times = []
        for variant in range(VARIANTS):
            multiply(x, codes, scales, variants=(variant,) * len(ROWS), dependent=False)
            runs = []
            for _ in range(RUNS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                multiply(x, codes, scales, variants=(variant,) * len(ROWS), dependent=False)
                end.record()
                end.synchronize()
                runs.append(begin.elapsed_time(end))
            times.append(sorted(runs)[RUNS // 2])
        fastest.append(times.index(min(times)))
    return tuple(fastest)


def tune(codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, ...]:
    """The fastest variant of the kernel for packed weights of this shape, for each of ROWS; measured once."""
    blocks, outputs = scales.shape
    with torch.cuda.device(codes.device):
        return _fastest(outputs, blocks * GROUP, codes.device)


def multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    variants: tuple[int, ...] = DEFAULT_VARIANTS,
    dependent: bool = True,
) -> torch.Tensor:
    """x [T, K] times packed weights: [T, N] bfloat16, summed in float32. T is 1 to MOST_ROWS.

    x: bfloat16, dense rows at multiples of 16 bytes. bias: [N] bfloat16. variants: of `tune`.
    dependent: the kernel may start, and read weights, before the one before it in the stream has ended;
    nothing may be writing weights then.
    Raises ValueError for shapes that the kernel cannot serve, RuntimeError where compiling fails.
    """
    blocks, outputs = scales.shape
    rows, inputs = x.shape
    if not 1 <= rows <= MOST_ROWS or inputs != blocks * GROUP:
        raise ValueError(f"x is {list(x.shape)}; needed: [1 to {MOST_ROWS}, {blocks * GROUP}]")
    if x.dtype != torch.bfloat16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(
            f"x is {x.dtype} with strides {x.stride()}, {x.data_ptr() % 16} bytes off a multiple of 16; "
            "needed: torch.bfloat16, strides (a multiple of 8, 1), at a multiple of 16"
        )
    if codes.numel() * 2 != inputs * outputs or codes.dtype != torch.uint8 or scales.dtype != torch.bfloat16:
        raise ValueError(
            f"codes are {codes.numel()} {codes.dtype}, scales {list(scales.shape)} {scales.dtype}; needed: "
            f"{inputs * outputs // 2} torch.uint8, [{blocks}, {outputs}] torch.bfloat16: use pack()"
        )
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)} {bias.dtype}; needed: [{outputs}] {x.dtype}")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    function = cuda_build.tvm_function("multiply_few_rows")
    with torch.cuda.device(x.device):
        function(x, codes, scales, bias, out, variants[rows > ROWS[0]], int(dependent))
    return out
