"""Causal attention over paged KV whose lengths live on the device, for every GPU that Triton compiles for.

The query tokens of a row and the heads of a KV group are packed into one tile, so that a key is read once for
all of them. The keys of each row are cut into the same number of equal shares: the number follows from the
shapes alone, the shares from the lengths on the device, so the grid is static and a launch can be captured in
a CUDA graph. A second, small kernel merges the shares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.score import LOG2E, multiprocessors

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUERY_BLOCK = 64
_MOST_SPLITS = 64
_INTERPRETER_SHARED = 100 * 1024
_TILES = ((64, 2), (32, 2), (16, 3), (32, 1), (16, 2), (16, 1))  # keys of a tile, tiles on their way
_FP32_TILES = ((16, 2), (16, 1))  # exact products take no tensor cores, and many registers


@triton.jit
def _widen(raw, dtype: tl.constexpr):
    """KV of a tile in the dtype of the products; bytes are float8_e4m3fn, and come out divided by 256."""
    if raw.dtype == tl.uint8:
        bits = raw.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return raw.to(dtype)


@triton.jit
def _gather(cache, slot, live, h, stride_slot, D: tl.constexpr, LANES: tl.constexpr):
    """[keys, LANES] of KV head h, as stored; zero where a key is not live and beyond D."""
    dim = tl.arange(0, LANES)
    pointers = cache + slot[:, None] * stride_slot + (h * D + dim)[None, :]
    mask = live[:, None] if D == LANES else live[:, None] & (dim < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _attend_span(q_tile, k_cache, v_cache, pages, start, end, last_seen, h, stride_slot, scale_log2,
                 D: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    """Softmax numerator [BLOCK_M, LANES], its denominator and the largest logit (base 2) over some keys.

    `end` is a multiple of BLOCK_N from `start`, or else beyond every `last_seen`.
    """
    largest = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a difference of two of them is not NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LANES], tl.float32)
    for at in range(start, end, BLOCK_N):
        positions = at + tl.arange(0, BLOCK_N)
        live = positions < end
        slot = tl.load(pages + positions, mask=live, other=0).to(tl.int64)
        k = _gather(k_cache, slot, live, h, stride_slot, D, LANES)
        v = _gather(v_cache, slot, live, h, stride_slot, D, LANES)
        logits = tl.dot(q_tile, tl.trans(_widen(k, q_tile.dtype)), input_precision="ieee") * scale_log2
        logits = tl.where(positions[None, :] <= last_seen[:, None], logits, float("-inf"))
        higher = tl.maximum(largest, tl.max(logits, 1))
        p = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(p, 1)
        v = _widen(v, q_tile.dtype)
        acc = tl.dot(p.to(q_tile.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = higher
    return acc, total, largest


@triton.jit
def _share(length, splits, BLOCK_N: tl.constexpr):
    """Keys of a row that each split takes, a multiple of BLOCK_N; the last splits may find none left."""
    return tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N


@triton.jit
def _row_queries(starts, row, most_queries, UNIFORM: tl.constexpr):
    """First token of a row and how many queries it has."""
    if UNIFORM:
        return row * most_queries, most_queries
    else:
        begin = tl.load(starts + row)
        return begin, tl.minimum(tl.load(starts + row + 1) - begin, most_queries)


_PLAIN = ["stride_pr", "stride_lh", "stride_lt", "most_queries", "q_blocks", "splits"]


@triton.jit(do_not_specialize=_PLAIN)  # few compilations for all batch sizes
def _attend_kernel(q, k_cache, v_cache, page_table, lengths, starts, out, lse, stride_qt, stride_qh,
                   stride_slot, stride_pr, stride_split, stride_lh, stride_lt, most_queries, q_blocks, splits,
                   scale_log2, v_scale, G: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
                   HKV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   UNIFORM: tl.constexpr):  # fmt: skip
    """A query block and KV head of a row over one share of its keys; the heads of a key run side by side."""
    item = tl.program_id(0)
    split = tl.program_id(1)
    block = item % q_blocks
    h = item // q_blocks % HKV
    row = item // q_blocks // HKV
    begin, queries = _row_queries(starts, row, most_queries, UNIFORM)
    length = tl.load(lengths + row)
    share = _share(length, splits, BLOCK_N)
    start = split * share
    end = tl.minimum(start + share, length)
    # Split 0 writes even where it has no keys: zero, with an LSE of -inf.
    if (block * BLOCK_M < queries * G) & ((start < end) | (split == 0)):
        column = block * BLOCK_M + tl.arange(0, BLOCK_M)
        real = column < queries * G
        line = (begin + column // G).to(tl.int64)
        head = h * G + column % G
        dim = tl.arange(0, LANES)
        inside = real[:, None] & (dim < D)[None, :]
        pointers = q + line[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :]
        q_tile = tl.load(pointers, mask=inside, other=0.0)
        last_seen = tl.where(real, length - queries + column // G, -1)
        pages = page_table + row.to(tl.int64) * stride_pr
        acc, total, largest = _attend_span(q_tile, k_cache, v_cache, pages, start, end, last_seen, h,
                                           stride_slot, scale_log2, D, LANES, BLOCK_M, BLOCK_N)  # fmt: skip
        acc = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        pointers = out + split.to(tl.int64) * stride_split
        pointers += ((line * (HKV * G) + head) * D)[:, None] + dim[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside)
        natural = (largest + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + head * stride_lh + line * stride_lt + split, natural, mask=real)


@triton.jit(do_not_specialize=["stride_lh", "stride_lt", "tokens", "most_queries", "splits"])
def _merge_kernel(parts, part_lse, lengths, starts, out, lse, stride_split, stride_lh, stride_lt, tokens,
                  most_queries, splits, HQ: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr,
                  HEADS: tl.constexpr, BLOCK_N: tl.constexpr, MOST_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
                  UNIFORM: tl.constexpr):  # fmt: skip
    """HEADS heads of a query token: the mean of their splits' outputs, weighted with the mass each saw."""
    row = tl.program_id(0) // most_queries
    query = tl.program_id(0) % most_queries
    begin, queries = _row_queries(starts, row, most_queries, UNIFORM)
    if query < queries:
        line = (begin + query).to(tl.int64)
        share = _share(tl.load(lengths + row), splits, BLOCK_N)
        used = tl.maximum(tl.cdiv(tl.load(lengths + row), tl.maximum(share, 1)), 1)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        some = head < HQ
        mine = part_lse + (head * tokens + line) * splits
        lane = tl.arange(0, MOST_SPLITS)[:, None]
        each = tl.load(mine[None, :] + lane, mask=(lane < used) & some[None, :], other=float("-inf"))
        largest = tl.maximum(tl.max(each, 0), -1e30)
        total = tl.sum(tl.exp(each - largest[None, :]), 0)
        acc = tl.zeros([HEADS, LANES], tl.float32)
        dim = tl.arange(0, LANES)
        place = (line * HQ + head)[:, None] * D + dim[None, :]
        inside = some[:, None] & (dim < D)[None, :]
        for first in range(0, used, CHUNK):
            split = first + tl.arange(0, CHUNK)
            live = (split < used)[:, None] & some[None, :]
            weight = tl.load(mine[None, :] + split[:, None], mask=live, other=float("-inf"))
            weight = tl.exp(weight - largest[None, :])
            pointers = parts + split.to(tl.int64)[:, None, None] * stride_split + place[None, :, :]
            part = tl.load(pointers, mask=live[:, :, None] & inside[None, :, :], other=0.0)
            acc += tl.sum(part * weight[:, :, None], 0)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + head * stride_lh + line * stride_lt, largest + tl.log(total), mask=some)


@dataclass(frozen=True)
class Tiling:
    """Launch tunables of the attention kernel: they change the time, never the result beyond rounding."""

    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use on the device."""
    if device.type != "cuda":
        return _INTERPRETER_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def choose_tiling(
    shared: int, lanes: int, block_m: int, q_bytes: int, kv_bytes: int, *, async_products: bool
) -> Tiling:
    """The widest tile and deepest pipeline that let two programs share a multiprocessor, or one if none does.

    Args:
        shared: bytes of shared memory that a program may use; a multiprocessor has 1 KiB more.
        lanes: head dim, rounded up to a power of two. block_m: query rows of a tile.
        q_bytes, kv_bytes: bytes of an element.
        async_products: whether products read their tiles while the next ones arrive (Hopper, B200): one tile
            more is then held.
    """
    num_warps = 8 if block_m * lanes > (64 * 128 if q_bytes < 4 else 16 * 128) else 4
    for budget in ((shared - 1024) // 2, shared):
        for block_n, tiles in _TILES if q_bytes < 4 else _FP32_TILES:
            held = tiles + async_products
            scratch = 0 if async_products else block_m * block_n * q_bytes
            needed = block_m * lanes * q_bytes + 2 * held * block_n * lanes * kv_bytes + scratch + 1024
            if needed <= budget:
                # Every other stage waits for the page table.
                return Tiling(block_n, num_warps, 2 * tiles + 1)
    return Tiling(16, num_warps, 1)


@functools.cache
def choose_splits(programs: int, multiprocessors: int, most: int) -> int:
    """Shares to cut each row's keys into: about two full waves, of two programs a multiprocessor.

    Args:
        programs: programs of one share of every row. most: upper bound of the result.
    """
    wave = 2 * multiprocessors
    least = max(1, min(most, 2 * wave // programs))

    def idle(splits: int) -> float:
        return -programs * splits % wave / (programs * splits)

    return min(range(least, min(most, least + 3) + 1), key=idle)


def _check_tensors(q, k_cache, v_cache, page_table) -> None:
    if q.dtype not in DTYPES or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"q is {q.dtype} and k_cache {k_cache.dtype}; q must be bfloat16, float16 or float32, and the "
            "caches of the same dtype or float8_e4m3fn."
        )
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype or k_cache.dim() != 3:
        raise ValueError(
            f"k_cache is {k_cache.dtype} {tuple(k_cache.shape)} and v_cache {v_cache.dtype} "
            f"{tuple(v_cache.shape)}; both must be [slots, KV heads, head dim] of one dtype."
        )
    if (
        q.dim() != 3
        or q.shape[2] != k_cache.shape[2]
        or q.shape[1] % k_cache.shape[1]
        or q.stride(2) != 1
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
    ):
        raise ValueError(
            f"q is {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}; they need the same head dim, query "
            "heads in multiples of the KV heads, contiguous caches and unit stride in q's last dimension."
        )
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head dim {q.shape[2]} is not supported; {', '.join(map(str, HEAD_DIMS))} are.")
    if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table is {page_table.dtype} {tuple(page_table.shape)}; it must be int32 [rows, width] "
            "with unit stride along positions."
        )


def _check_rows(q, page_table, lengths, starts, most_queries: int, out, lse) -> None:
    rows, tokens = page_table.shape[0], q.shape[0]
    if most_queries < 1 or (starts is None and tokens != rows * most_queries):
        raise ValueError(
            f"q holds {tokens} tokens for {rows} rows and most_queries={most_queries}; most_queries must be "
            "1 or more, and without `starts` q must hold rows x most_queries tokens."
        )
    for name, vector, size in (("lengths", lengths, rows), ("starts", starts, rows + 1)):
        if vector is not None and (
            vector.dtype != torch.int32 or vector.shape != (size,) or not vector.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {vector.dtype} {tuple(vector.shape)}; it must be contiguous int32 [{size}] for "
                f"{rows} rows of the page table."
            )
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; it must be contiguous and like q, {q.dtype} "
            f"{tuple(q.shape)}."
        )
    if lse is not None and (lse.shape != (q.shape[1], tokens) or lse.dtype != torch.float32):
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)}; it must be float32 [query heads, tokens] = "
            f"{(q.shape[1], tokens)}."
        )


def _bytes_of_fp8(k_cache, v_cache, k_scale: float, v_scale: float):
    """fp8 caches as bytes for devices whose Triton cannot convert fp8 (`_widen` can); others as they are."""
    if k_cache.dtype != torch.float8_e4m3fn or not (0, 0) < _capability(k_cache.device) < (8, 9):
        return k_cache, v_cache, k_scale, v_scale
    return k_cache.view(torch.uint8), v_cache.view(torch.uint8), k_scale * 256, v_scale * 256


def _tiling(q, k_cache, block_m: int, block_n, num_warps, num_stages) -> Tiling:
    """The tunables that are given, and defaults for those that are None."""
    # Converting bytes takes registers: their tiles are no larger than those of 16-bit caches.
    kv_bytes = q.element_size() if k_cache.dtype == torch.uint8 else k_cache.element_size()
    chosen = choose_tiling(
        _shared_bytes(q.device), triton.next_power_of_2(q.shape[2]), block_m, q.element_size(), kv_bytes,
        async_products=_capability(q.device)[0] in (9, 10, 11) and block_m >= 64,
    )  # fmt: skip
    return Tiling(block_n or chosen.block_n, num_warps or chosen.num_warps, num_stages or chosen.num_stages)


def _launch(
    q, k_cache, v_cache, page_table, lengths, starts, out, lse, *, most_queries: int, splits: int,
    scale_log2: float, v_scale: float, block_m: int, tiling: Tiling,
) -> None:  # fmt: skip
    """One share of each row's keys goes to `out` and `lse` at once; several are merged from a workspace."""
    (rows, _), (tokens, heads, dim), kv_heads = page_table.shape, q.shape, k_cache.shape[1]
    lanes = triton.next_power_of_2(dim)
    q_blocks = triton.cdiv(most_queries * (heads // kv_heads), block_m)
    if splits > 1:
        target = torch.empty(splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(heads, tokens, splits, dtype=torch.float32, device=q.device)
    else:
        target, target_lse = out[None], lse[..., None]
    bounds = lengths if starts is None else starts
    _attend_kernel[(rows * kv_heads * q_blocks, splits)](
        q, k_cache, v_cache, page_table, lengths, bounds, target, target_lse, q.stride(0), q.stride(1),
        k_cache.stride(0), page_table.stride(0), target.stride(0), target_lse.stride(0), target_lse.stride(1),
        most_queries, q_blocks, splits, scale_log2, v_scale, G=heads // kv_heads, D=dim, LANES=lanes,
        HKV=kv_heads, BLOCK_M=block_m, BLOCK_N=tiling.block_n, UNIFORM=starts is None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_heads = min(triton.next_power_of_2(heads), max(1, 512 // lanes))
        _merge_kernel[(rows * most_queries, triton.cdiv(heads, block_heads))](
            target, target_lse, lengths, bounds, out, lse, target.stride(0), lse.stride(0), lse.stride(1),
            tokens, most_queries, splits, HQ=heads, D=dim, LANES=lanes, HEADS=block_heads,
            BLOCK_N=tiling.block_n, MOST_SPLITS=_MOST_SPLITS, CHUNK=4, UNIFORM=starts is None, num_warps=4,
        )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    *,
    most_queries: int,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    splits: int | None = None,
    block_n: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of ragged rows over paged KV, page size 1; nothing is read on the host.

    Row r has the query tokens starts[r] .. starts[r+1]-1 of q. Its last query sees `lengths[r]` keys, each
    query before it one less than the next. A row of length 0 gets zeros and an LSE of -inf; tokens of no row
    are left as they are. A row must not have more queries than keys, unless it has no keys.

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32, unit stride in D. D is 16, 32, 64, 80, 96, 128, 192 or 256.
        k_cache, v_cache: [slots, Hkv, D] contiguous, of q's dtype or float8_e4m3fn.
        page_table: int32 [R, W], any row stride: the slot of each position. Entries from a row's length on
            are not read, and neither are slots that no entry names.
        lengths: int32 [R] keys. starts: int32 [R+1], ascending; None: every row has `most_queries` queries.
        most_queries: upper bound of any row's queries; further ones are ignored.
        scale: softmax scale. k_scale, v_scale: what fp8 keys and values are multiplied with.
        out: [T, Hq, D] contiguous, of q's dtype. lse: float32 [Hq, T], any strides. Allocated if not given.
        splits: shares that each row's keys are cut into, 1 to 64. block_n: keys of a tile, a power of two
            of at least 16. num_warps, num_stages: of the main kernel. These change the time, never the
            result beyond rounding; None picks defaults that fit the device.

    Returns:
        out, and lse: the natural logarithm of each query's sum of exp(scale * k_scale * q.k).

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
    """
    _check_tensors(q, k_cache, v_cache, page_table)
    _check_rows(q, page_table, lengths, starts, most_queries, out, lse)
    if splits is not None and not 1 <= splits <= _MOST_SPLITS:
        raise ValueError(f"splits is {splits}; it must be 1 to {_MOST_SPLITS}, or None for the default.")
    rows, width = page_table.shape
    tokens, heads = q.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device) if lse is None else lse
    if rows == 0 or tokens == 0:
        return out, lse
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        q = q.float()  # Triton's interpreter multiplies bf16 bit patterns; the caches are cast to q's dtype
    k_cache, v_cache, k_scale, v_scale = _bytes_of_fp8(k_cache, v_cache, k_scale, v_scale)
    columns = most_queries * (heads // k_cache.shape[1])
    block_m = max(16, min(_QUERY_BLOCK if q.element_size() < 4 else 16, triton.next_power_of_2(columns)))
    tiling = _tiling(q, k_cache, block_m, block_n, num_warps, num_stages)
    if splits is None:
        splits = choose_splits(
            rows * k_cache.shape[1] * triton.cdiv(columns, block_m),
            multiprocessors(q.device),
            max(1, min(_MOST_SPLITS, width // (2 * tiling.block_n))),
        )
    _launch(
        q, k_cache, v_cache, page_table, lengths, starts, out, lse, most_queries=most_queries, splits=splits,
        scale_log2=scale * k_scale * LOG2E, v_scale=v_scale, block_m=block_m, tiling=tiling,
    )  # fmt: skip
    return out, lse
