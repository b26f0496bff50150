"""A Triton kernel that only reads: the measure of the card's read bandwidth."""

import triton
import triton.language as tl

BLOCK, STEPS = tl.constexpr(4096), tl.constexpr(8)
PER_PROGRAM = 4096 * 8


@triton.jit
def read_kernel(SOURCE, SUMS):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK * STEPS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(SOURCE + at + step * BLOCK)
    tl.store(SUMS + program, tl.sum(total, 0))
