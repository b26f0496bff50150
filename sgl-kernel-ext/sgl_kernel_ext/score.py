"""Scores of the keys of verify rows: attention probabilities, averaged over real queries and heads.

A program takes an equal, contiguous share of all key blocks, so the grid is static (the lengths stay on the
device, the launch can be captured in a CUDA graph) and the shares differ by one block at most. Keys are the M
side of the matrix product: K goes through shared memory once and the sum over queries stays within a warp.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
SCOPES = ("layer", "kv_head")
ORDERS = ("heads_inner", "keys_inner")
_QUERY_BLOCK = 64
_SHARED_BYTES = 100 * 1024  # of a program; two share an SM of an H200 (the fastest setting of tests/sweep.py)
_INTERPRETER_PROGRAMS = 3


@triton.jit
def _query_tile(q, lse, row, h, block, real, stride_qt, stride_qh, stride_lh, Q: tl.constexpr,
                G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """q^T [D, BLOCK_Q] of KV head h, its LSE in base 2 (+inf on padding), the query token of each column."""
    columns = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    token = columns // G
    head = h * G + columns % G
    mask = token < real
    line = (row * Q + token).to(tl.int64)
    pointers = q + line[None, :] * stride_qt + head[None, :] * stride_qh + tl.arange(0, D)[:, None]
    tile = tl.load(pointers, mask=mask[None, :], other=0.0)
    base2 = tl.load(lse + head * stride_lh + line, mask=mask, other=float("inf")) * 1.4426950408889634
    return tile, base2, token


@triton.jit
def _key_tile(k_cache, pages, positions, end, h, stride_ks, D: tl.constexpr):
    """K [BLOCK_N, D] of the given positions; positions from `end` on are never dereferenced and read as 0."""
    live = positions < end
    slot = tl.load(pages + positions, mask=live, other=0).to(tl.int64)
    pointers = k_cache + slot[:, None] * stride_ks + (h * D + tl.arange(0, D))[None, :]
    return tl.load(pointers, mask=live[:, None], other=0.0)


@triton.jit
def _probability_sum(k, q_tile, base2, token, positions, committed, scale_log2):
    """Sum over the columns of the query tile of each key's softmax probability, float32 [BLOCK_N]."""
    logits = tl.dot(k.to(q_tile.dtype), q_tile, input_precision="ieee")
    p = tl.exp2(logits * scale_log2 - base2[None, :])
    return tl.sum(tl.where(positions[:, None] <= committed + token[None, :], p, 0.0), 1)


@triton.jit
def _store_keys(out, total, positions, live, committed, real, heads):
    """Write the sortable keys of summed probabilities; a mean above 1 is rounding and is cut."""
    seen_by = tl.maximum(real - tl.maximum(positions - committed, 0), 1)
    score = tl.minimum(total / (seen_by * heads).to(tl.float32), 1.0)
    tl.store(out + positions, (score.to(tl.int32, bitcast=True) >> 15).to(tl.int16), mask=live)


@triton.jit
def _heads_inner(q, k_cache, lse, pages, out, row, start, end, committed, real, stride_qt, stride_qh,
                 stride_ks, stride_lh, stride_oh, scale_log2, Q: tl.constexpr, G: tl.constexpr,
                 D: tl.constexpr, HKV: tl.constexpr, BLOCK_Q: tl.constexpr, Q_BLOCKS: tl.constexpr,
                 BLOCK_N: tl.constexpr, PER_HEAD: tl.constexpr):  # fmt: skip
    """One flat loop over (key block, KV head, query block): the load pipeline never drains within a span."""
    STEPS: tl.constexpr = HKV * Q_BLOCKS
    GROUP: tl.constexpr = Q_BLOCKS if PER_HEAD else STEPS
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, tl.cdiv(end - start, BLOCK_N) * STEPS):
        step = i % STEPS
        h = step // Q_BLOCKS
        positions = start + i // STEPS * BLOCK_N + tl.arange(0, BLOCK_N)
        k = _key_tile(k_cache, pages, positions, end, h, stride_ks, D)
        q_tile, base2, token = _query_tile(q, lse, row, h, step % Q_BLOCKS, real, stride_qt, stride_qh,
                                           stride_lh, Q, G, D, BLOCK_Q)  # fmt: skip
        part = _probability_sum(k, q_tile, base2, token, positions, committed, scale_log2)
        total = tl.where(step % GROUP == 0, 0.0, total) + part
        line = out + h * stride_oh if PER_HEAD else out
        live = (positions < end) & (step % GROUP == GROUP - 1)
        _store_keys(line, total, positions, live, committed, real, G if PER_HEAD else HKV * G)


@triton.jit
def _keys_inner(q, k_cache, lse, pages, out, row, start, end, committed, real, stride_qt, stride_qh,
                stride_ks, stride_lh, stride_oh, scale_log2, Q: tl.constexpr, G: tl.constexpr,
                D: tl.constexpr, HKV: tl.constexpr, BLOCK_Q: tl.constexpr, Q_BLOCKS: tl.constexpr,
                BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PER_HEAD: tl.constexpr):  # fmt: skip
    """The query tile stays put while CHUNK keys pass; their sums stay in registers over the heads."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK_N
    block = tl.arange(0, BLOCKS)
    for first in range(start, end, CHUNK):
        total = tl.zeros([BLOCKS, BLOCK_N], tl.float32)
        places = first + block[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        used = tl.cdiv(tl.minimum(end - first, CHUNK), BLOCK_N)
        for step in range(0, HKV * Q_BLOCKS):
            h = step // Q_BLOCKS
            q_tile, base2, token = _query_tile(q, lse, row, h, step % Q_BLOCKS, real, stride_qt, stride_qh,
                                               stride_lh, Q, G, D, BLOCK_Q)  # fmt: skip
            for i in range(0, used):
                positions = first + i * BLOCK_N + tl.arange(0, BLOCK_N)
                k = _key_tile(k_cache, pages, positions, end, h, stride_ks, D)
                part = _probability_sum(k, q_tile, base2, token, positions, committed, scale_log2)
                total = tl.where(block[:, None] == i, total + part[None, :], total)
            if PER_HEAD:
                live = (places < end) & (step % Q_BLOCKS == Q_BLOCKS - 1)
                _store_keys(out + h * stride_oh, total, places, live, committed, real, G)
                total = tl.where(step % Q_BLOCKS == Q_BLOCKS - 1, 0.0, total)
        if not PER_HEAD:
            _store_keys(out, total, places, places < end, committed, real, HKV * G)


@triton.jit(do_not_specialize=["stride_lh", "stride_pr", "stride_oh", "rows"])
def _score_kernel(q, k_cache, lse, page_table, first, queries, prefix, offset, out, stride_qt, stride_qh,
                  stride_ks, stride_lh, stride_pr, stride_oh, rows, scale_log2, ROWS: tl.constexpr,
                  Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HKV: tl.constexpr, BLOCK_Q: tl.constexpr,
                  Q_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PER_HEAD: tl.constexpr,
                  KEYS_INNER: tl.constexpr):  # fmt: skip
    """Deal the key blocks of all rows out in equal contiguous shares; walk this program's row by row."""
    lane = tl.arange(0, ROWS)
    room = tl.load(offset + lane, mask=lane < rows, other=-1) >= 0
    room = room & (tl.load(queries + lane, mask=lane < rows, other=0) > 0)
    blocks = tl.cdiv(tl.maximum(tl.load(prefix + lane, mask=room, other=0), 0), BLOCK_N)
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0).to(tl.int64)
    at = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
    stop = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
    while at < stop:
        row = tl.sum((ends <= at).to(tl.int32), 0)
        row_end = tl.sum(tl.where(lane == row, ends, 0), 0)
        row_at = row_end - tl.sum(tl.where(lane == row, blocks, 0), 0)
        until = tl.minimum(stop, row_end)
        start = (at - row_at) * BLOCK_N
        end = tl.minimum((until - row_at) * BLOCK_N, tl.load(prefix + row))
        committed = tl.load(first + row)
        real = tl.minimum(tl.load(queries + row), Q)
        pages = page_table + row.to(tl.int64) * stride_pr
        keys = out + tl.load(offset + row)
        if KEYS_INNER:
            _keys_inner(q, k_cache, lse, pages, keys, row, start, end, committed, real, stride_qt, stride_qh,
                        stride_ks, stride_lh, stride_oh, scale_log2, Q, G, D, HKV, BLOCK_Q, Q_BLOCKS, BLOCK_N,
                        CHUNK, PER_HEAD)  # fmt: skip
        else:
            _heads_inner(q, k_cache, lse, pages, keys, row, start, end, committed, real, stride_qt, stride_qh,
                         stride_ks, stride_lh, stride_oh, scale_log2, Q, G, D, HKV, BLOCK_Q, Q_BLOCKS,
                         BLOCK_N, PER_HEAD)  # fmt: skip
        at = until


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a few programs for Triton's interpreter elsewhere."""
    if device.type != "cuda":
        return _INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _pipeline_stages(stage_bytes: int) -> int:
    """`num_stages` that gives up to four tiles: Triton spends every other stage on the page table."""
    return 2 * max(1, min(4, _SHARED_BYTES // stage_bytes)) - 1


def _check_score(q, k_cache, lse, page_table, offset, out, padded_queries: int, scope: str) -> None:
    if scope not in SCOPES:
        raise ValueError(f"scope is {scope!r}; it must be one of {SCOPES}.")
    rows, head_dim, kv_heads = page_table.shape[0], q.shape[2], k_cache.shape[1]
    if not 1 <= padded_queries <= 64 or q.shape[0] != rows * padded_queries:
        raise ValueError(
            f"q holds {q.shape[0]} tokens for {rows} rows of padded_queries={padded_queries}; it must hold "
            "rows x padded_queries, with padded_queries 1 to 64: pad each row to the same number of queries."
        )
    if (
        k_cache.shape[2] != head_dim
        or q.shape[1] % kv_heads
        or not k_cache.is_contiguous()
        or q.stride(2) != 1
    ):
        raise ValueError(
            f"q is {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}; they need the same head dim, query "
            "heads in multiples of the KV heads, a contiguous k_cache and unit stride in q's last dimension."
        )
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head dim {head_dim} is not supported; 16, 32, 64, 128 and 256 are.")
    if lse.shape != (q.shape[1], q.shape[0]) or lse.dtype != torch.float32 or lse.stride(1) != 1:
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)}; it must be float32 [query heads, tokens] = "
            f"{(q.shape[1], q.shape[0])} with unit stride in its last dimension."
        )
    if page_table.dtype != torch.int32 or page_table.stride(1) != 1 or offset.dtype != torch.int64:
        raise ValueError(
            f"page_table is {page_table.dtype} and offset {offset.dtype}; they must be int32 (unit stride "
            "along positions) and int64."
        )
    if out.dtype != torch.int16 or out.dim() != SCOPES.index(scope) + 1 or out.stride(-1) != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; scope {scope!r} needs int16 "
            f"{'[capacity]' if scope == 'layer' else '[kv heads, capacity]'} with unit stride along the keys."
        )


def score_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    lse: torch.Tensor,
    page_table: torch.Tensor,
    first: torch.Tensor,
    queries: torch.Tensor,
    prefix: torch.Tensor,
    offset: torch.Tensor,
    out: torch.Tensor,
    *,
    padded_queries: int,
    scale: float,
    scope: str = "layer",
    k_scale: float = 1.0,
    order: str | None = None,
    block_n: int | None = None,
    chunk: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    programs_per_sm: int | None = None,
) -> None:
    """Write the sortable 16-bit score of each key below a verify row's scored prefix (arXiv 2512.01278, 4.2).

    The score of key j is the softmax probability that the row's real queries at positions >= j gave it,
    averaged over those queries and the heads in scope. It is written as ``float32 bits >> 15``: monotone and
    never negative.

    Args:
        q: [R*Q, Hq, D]; query token t of row r is token r*Q + t. bf16, fp16 or fp32, unit stride in D.
        k_cache: [slots, Hkv, D] contiguous, page size 1, of q's dtype or float8_e4m3fn.
        lse: float32 [Hq, R*Q], natural log of the sum of exp(scale * q.k), as full attention returned it.
        page_table: int32 [R, W], any row stride; only positions below a row's prefix are read.
        first, queries, prefix: int32 [R]: committed length, real queries (0: empty row slot), scored keys.
        offset: int64 [R], where a row's keys stand in `out`; negative: the row is skipped.
        out: int16 [capacity] for scope "layer", [Hkv, capacity] for "kv_head"; nothing else in it is touched.
        padded_queries: Q, queries a row slot holds (1 to 64).
        scale: softmax scale. k_scale: what an fp8 key is multiplied with.
        order: "heads_inner" streams (key block, head) pairs through one pipeline and reloads the query tile;
            "keys_inner" keeps the query tile while `chunk` keys pass.
        block_n, chunk (keys, powers of two), num_warps, num_stages, programs_per_sm: launch tunables. They
            change the time, never the result beyond rounding; None picks a default that fits the head dim.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
    """
    _check_score(q, k_cache, lse, page_table, offset, out, padded_queries, scope)
    if order is not None and order not in ORDERS:
        raise ValueError(f"order is {order!r}; it must be one of {ORDERS}, or None for the default.")
    rows, head_dim, kv_heads = page_table.shape[0], q.shape[2], k_cache.shape[1]
    if rows == 0:
        return
    group = q.shape[1] // kv_heads
    columns = padded_queries * group
    block_q = max(16, min(_QUERY_BLOCK, triton.next_power_of_2(columns)))
    block_n = block_n or max(16, min(64, 64 * 256 // (head_dim * k_cache.element_size())))
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        q = q.float()  # Triton's interpreter multiplies bf16 bit patterns; K is cast to q's dtype
    stage_bytes = head_dim * (block_n * k_cache.element_size() + block_q * q.element_size())
    _score_kernel[(multiprocessors(q.device) * (programs_per_sm or 2),)](
        q, k_cache, lse, page_table, first, queries, prefix, offset, out,
        q.stride(0), q.stride(1), k_cache.stride(0), lse.stride(0), page_table.stride(0),
        out.stride(0) if scope == "kv_head" else 0, rows, scale * k_scale * LOG2E,
        ROWS=max(64, triton.next_power_of_2(rows)), Q=padded_queries, G=group, D=head_dim, HKV=kv_heads,
        BLOCK_Q=block_q, Q_BLOCKS=triton.cdiv(columns, block_q), BLOCK_N=block_n,
        CHUNK=max(chunk or 1024, block_n), PER_HEAD=scope == "kv_head", KEYS_INNER=order == "keys_inner",
        num_warps=num_warps or 4, num_stages=num_stages or _pipeline_stages(stage_bytes),
    )  # fmt: skip
