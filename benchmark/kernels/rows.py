"""Random data of a shape: one KV pool for all, and page tables that lead each launch to other slots of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from shapes import Shape

POOL_SLOTS = (1 << 20) - 64  # 2 GiB of K: within what 32-bit offsets reach


class KvPool:
    """K and V of one layer, [slots, Hkv, D]; slot 0 is a dummy."""

    def __init__(self, slots: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        size = (slots, kv_heads, dim)
        self.k = torch.empty(size, device=device, dtype=dtype).normal_(generator=generator)
        self.v = torch.empty(size, device=device, dtype=dtype).normal_(generator=generator)
        self.order = torch.randperm(slots - 1, device=device, generator=generator).int() + 1
        self.device, self.dtype, self.slots = device, dtype, slots


@dataclass(frozen=True)
class Rows:
    """The tensors of one shape in the layout that all kernels share.

    `tables` are up to ten page tables [R, W] int32 of distinct slots, which launches take in turn. W is the
    keys of a row rounded up to 16; what stands behind them is the dummy slot.
    """

    shape: Shape
    pool: KvPool
    q: torch.Tensor  # [R*Q, Hq, D]
    tables: list[torch.Tensor]
    first: torch.Tensor  # [R] int32
    queries: torch.Tensor  # [R] int32
    offset: torch.Tensor  # [R] int64
    capacity: int

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5

    def table(self, launch: int) -> torch.Tensor:
        return self.tables[launch % len(self.tables)]


def make_rows(shape: Shape, pool: KvPool, tables: int = 10) -> Rows:
    """Rows with random slots. Raises ValueError when the pool is too small for the shape."""
    if shape.slots > pool.slots - 1:
        raise ValueError(f"{shape.name} needs {shape.slots} slots, the pool has {pool.slots - 1}.")
    size = (shape.rows * shape.queries, shape.heads, shape.dim)
    generator = torch.Generator(device=pool.device).manual_seed(1)
    fit = min(tables, (pool.slots - 1) // shape.slots)
    ints = {"dtype": torch.int32, "device": pool.device}
    line = -(-shape.context // 16) * 16
    return Rows(
        shape=shape,
        pool=pool,
        q=torch.empty(size, device=pool.device, dtype=pool.dtype).normal_(generator=generator),
        tables=[_table(shape, pool, i * shape.slots) for i in range(fit)],
        first=torch.full((shape.rows,), shape.context, **ints),
        queries=torch.full((shape.rows,), shape.queries, **ints),
        offset=torch.arange(shape.rows, device=pool.device) * line,
        capacity=shape.rows * line,
    )


def _table(shape: Shape, pool: KvPool, start: int) -> torch.Tensor:
    # Every table has an allocation of its own: Triton compiles anew for another alignment, and must not while
    # a graph is captured.
    table = torch.zeros(shape.rows, -(-shape.keys // 16) * 16, dtype=torch.int32, device=pool.device)
    table[:, : shape.keys] = pool.order[start : start + shape.slots].view(shape.rows, shape.keys)
    return table


def reference(rows: Rows, row: int, launch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, Hq, D] and LSE [Hq, Q] (natural log) of one row, in float32 and plain torch."""
    shape, slots = rows.shape, rows.table(launch)[row, : rows.shape.keys].long()
    group = shape.heads // shape.kv_heads
    q = rows.q[row * shape.queries : (row + 1) * shape.queries].float()
    k = rows.pool.k[slots].float().repeat_interleave(group, 1)
    v = rows.pool.v[slots].float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * rows.scale
    position = torch.arange(shape.keys, device=q.device)
    visible = position[None] <= shape.context + torch.arange(shape.queries, device=q.device)[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), v), lse


def reference_lse(rows: Rows, launch: int = 0) -> torch.Tensor:
    """LSE of all rows, [Hq, R*Q] float32."""
    return torch.cat([reference(rows, row, launch)[1] for row in range(rows.shape.rows)], 1).contiguous()


def check_output(rows: Rows, out: torch.Tensor, launch: int = 0) -> None:
    """Compare the first and the last row of an attention output [R*Q, Hq, D] with the reference.

    Raises:
        ValueError: they differ by more than 2e-2 (bfloat16 sums over thousands of keys differ by less).
    """
    for row in {0, rows.shape.rows - 1}:
        part = out.view(rows.shape.rows, rows.shape.queries, rows.shape.heads, rows.shape.dim)[row].float()
        worst = float((part - reference(rows, row, launch)[0]).abs().max())
        if not worst <= 2e-2:
            raise ValueError(f"wrong result: row {row} is off by {worst:.3g} (2e-2 is allowed)")
