"""The keys with the highest scores of every row, head and layer: exact, ragged, in one launch.

One program handles one line (layer, head, row). A line that fits a tile is read once and stays in registers,
where bisection finds its threshold: a count per step does not care how skewed the scores are, unlike a
histogram. Longer lines are read once per two bits of the threshold (from L2) and once more to write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_TILE = 32768  # two counts of a tile share one int32


@triton.jit
def _load_tile(
    keys, line_at, n, tile, sink, recent, TOP: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr
):
    """Ranks int32 [TILE] (forced positions: TOP, lanes outside the line: -1) and their positions.

    Loads start at a multiple of VEC and may touch neighbouring lines, which are then ranked -1.
    """
    aligned = tl.multiple_of(line_at // VEC * VEC, VEC)
    shift = (line_at - aligned).to(tl.int32)
    lane = tile + tl.arange(0, TILE)
    limit = tl.multiple_of((shift + n + VEC - 1) // VEC * VEC, VEC)
    raw = tl.load(keys + aligned + lane, mask=lane < limit, other=0)
    if keys.dtype.element_ty == tl.int32:
        rank = raw.to(tl.float32).to(tl.int32, bitcast=True) >> 15
    else:
        rank = raw.to(tl.int32)
    position = lane - shift
    rank = tl.where((position < sink) | (position >= n - recent), TOP, rank)
    return tl.where((position >= 0) & (position < n), rank, -1), position


@triton.jit
def _bisect(rank, wanted, TOP: tl.constexpr):
    """Largest threshold that `wanted` ranks reach, and how many exceed it; for ranks in registers."""
    low = 0
    high = TOP + 1
    above = 0
    while high - low > 1:
        middle = (low + high) // 2
        count = tl.sum((rank >= middle).to(tl.int32), 0)
        low = tl.where(count == wanted, middle - 1, tl.where(count > wanted, middle, low))
        high = tl.where(count > wanted, high, middle)
        above = tl.where(count > wanted, above, count)
    return low, above


@triton.jit
def _bisect_tiles(keys, line_at, n, tiles, wanted, sink, recent, TOP: tl.constexpr, TILE: tl.constexpr,
                  VEC: tl.constexpr):  # fmt: skip
    """As `_bisect` for a line of several tiles: three thresholds a pass, their counts packed 10 bits each."""
    low = 0
    high = TOP + 1
    above = 0
    while high - low > 1:
        span = high - low
        t1 = low + tl.maximum(span // 4, 1)
        t2 = tl.maximum(low + span // 2, t1)
        t3 = tl.maximum(low + span - tl.maximum(span // 4, 1), t2)
        packed = tl.zeros([TILE], tl.int32)
        for tile in range(0, tiles * TILE, TILE):
            rank, _ = _load_tile(keys, line_at, n, tile, sink, recent, TOP, TILE, VEC)
            packed += (rank >= t1).to(tl.int32) + ((rank >= t2).to(tl.int32) << 10)
            packed += (rank >= t3).to(tl.int32) << 20
        c1 = tl.sum(packed & 1023, 0)
        c2 = tl.sum((packed >> 10) & 1023, 0)
        c3 = tl.sum(packed >> 20, 0)
        low = tl.where(c3 >= wanted, t3, tl.where(c2 >= wanted, t2, tl.where(c1 >= wanted, t1, low)))
        high = tl.where(c1 < wanted, t1, tl.where(c2 < wanted, t2, tl.where(c3 < wanted, t3, high)))
        above = tl.where(c1 < wanted, c1, tl.where(c2 < wanted, c2, tl.where(c3 < wanted, c3, above)))
    return low, above


@triton.jit
def _write_tile(rank, position, out, threshold, ties, taken, tied, TILE: tl.constexpr):
    """Append a tile's chosen positions in order; returns the counts above and at the threshold so far."""
    greater = rank > threshold
    equal = rank == threshold
    packed = greater.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(packed, 0) - packed
    equal_before = tied + ((before >> 16) & 0xFFFF)
    chosen = greater | (equal & (equal_before < ties))
    place = taken + (before & 0xFFFF) + tl.minimum(equal_before, ties)
    tl.store(out + place, position, mask=chosen)
    total = tl.sum(packed, 0)
    return taken + (total & 0xFFFF), tied + ((total >> 16) & 0xFFFF)


@triton.jit
def _clear(keys, line_at, position, n):
    tl.store(keys + line_at + position, tl.zeros_like(position), mask=(position >= 0) & (position < n))


@triton.jit
def _select_short(keys, line_at, out, n, wanted, sink, recent, TOP: tl.constexpr, TILE: tl.constexpr,
                  VEC: tl.constexpr, CLEAR: tl.constexpr):  # fmt: skip
    rank, position = _load_tile(keys, line_at, n, 0, sink, recent, TOP, TILE, VEC)
    threshold, above = _bisect(rank, wanted, TOP)
    _write_tile(rank, position, out, threshold, wanted - above, 0, 0, TILE)
    if CLEAR:
        _clear(keys, line_at, position, n)


@triton.jit
def _select_long(keys, line_at, out, n, wanted, sink, recent, TOP: tl.constexpr, TILE: tl.constexpr,
                 VEC: tl.constexpr, CLEAR: tl.constexpr):  # fmt: skip
    tiles = tl.cdiv(n + VEC, TILE)
    threshold, above = _bisect_tiles(keys, line_at, n, tiles, wanted, sink, recent, TOP, TILE, VEC)
    taken = 0
    tied = 0
    for tile in range(0, tiles * TILE, TILE):
        rank, position = _load_tile(keys, line_at, n, tile, sink, recent, TOP, TILE, VEC)
        taken, tied = _write_tile(rank, position, out, threshold, wanted - above, taken, tied, TILE)
        if CLEAR:
            _clear(keys, line_at, position, n)


_PLAIN = ["stride_kl", "stride_kh", "stride_sl", "stride_sh", "stride_sr", "heads", "ratio_ppm", "min_tokens",
          "sink", "recent", "width"]  # fmt: skip


@triton.jit
def budget_of(prefix, ratio_ppm, min_tokens, kept, width):
    """Positions that a selection from `prefix` keys holds, int32 (the reference: `selected_count`)."""
    share = ((prefix.to(tl.int64) * ratio_ppm + 999999) // 1000000).to(tl.int32)
    return tl.minimum(tl.minimum(tl.maximum(share, min_tokens) + kept, prefix), width)


@triton.jit(do_not_specialize=_PLAIN)  # one compilation for all shapes
def _select_kernel(keys, offset, prefix, pools, selected, stride_kl, stride_kh, stride_sl, stride_sh,
                   stride_sr, heads, ratio_ppm, min_tokens, sink, recent, width, TOP: tl.constexpr,
                   TILE: tl.constexpr, LONG_TILE: tl.constexpr, VEC: tl.constexpr,
                   CLEAR: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    layer = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    at = tl.load(offset + row)
    n = tl.load(prefix + row)
    if (at >= 0) & (n > 0):
        wanted = budget_of(n, ratio_ppm, min_tokens, sink + recent, width)
        line_at = layer * stride_kl + head * stride_kh + at
        out = selected + layer * stride_sl + head * stride_sh + tl.load(pools + row).to(tl.int64) * stride_sr
        if n + VEC <= TILE // 4:
            _select_short(keys, line_at, out, n, wanted, sink, recent, TOP, TILE // 4, VEC, CLEAR)
        elif n + VEC <= TILE // 2:
            _select_short(keys, line_at, out, n, wanted, sink, recent, TOP, TILE // 2, VEC, CLEAR)
        elif n + VEC <= TILE:
            _select_short(keys, line_at, out, n, wanted, sink, recent, TOP, TILE, VEC, CLEAR)
        else:
            _select_long(keys, line_at, out, n, wanted, sink, recent, TOP, LONG_TILE, VEC, CLEAR)


def _check_select(keys, offset, prefix, pools, selected, ratio_ppm, min_tokens, sink, recent) -> None:
    if keys.dtype not in (torch.int16, torch.int32) or keys.dim() not in (2, 3) or keys.stride(-1) != 1:
        raise ValueError(
            f"keys is {keys.dtype} {tuple(keys.shape)}; it must be int16 (sortable) or int32 (fixed point), "
            "[layers, capacity] or [layers, heads, capacity] with unit stride along the keys."
        )
    heads = keys.shape[1] if keys.dim() == 3 else 1
    if selected.dtype != torch.int32 or selected.dim() != 4 or selected.shape[:2] != (keys.shape[0], heads):
        raise ValueError(
            f"selected is {selected.dtype} {tuple(selected.shape)}; it must be int32 [{keys.shape[0]} "
            f"layers, {heads} heads, rows of the state, width] to fit keys {tuple(keys.shape)}."
        )
    if selected.stride(3) != 1 or offset.dtype != torch.int64 or {prefix.dtype, pools.dtype} != {torch.int32}:
        raise ValueError(
            f"offset is {offset.dtype}, prefix {prefix.dtype}, pools {pools.dtype}, stride of the last "
            f"dimension of selected {selected.stride(3)}; they must be int64, int32, int32 and 1."
        )
    if min(ratio_ppm, min_tokens, sink, recent) < 0 or ratio_ppm > 1_000_000:
        raise ValueError(
            f"ratio_ppm={ratio_ppm}, min_tokens={min_tokens}, sink={sink}, recent={recent}; none may be "
            "negative and ratio_ppm is at most 1000000 (parts per million of the scored prefix)."
        )


def select(
    keys: torch.Tensor,
    offset: torch.Tensor,
    prefix: torch.Tensor,
    pools: torch.Tensor,
    selected: torch.Tensor,
    *,
    ratio_ppm: int,
    min_tokens: int,
    sink: int,
    recent: int,
    clear: bool = False,
    tile: int = 16384,
    long_tile: int | None = None,
    num_warps: int = 16,
) -> None:
    """Write each row's highest-scored logical positions, ascending, for all layers in one launch.

    Row r gets ``n = min(prefix, max(min_tokens, ceil(prefix * ratio_ppm / 1e6)) + sink + recent, width)``
    positions in ``selected[layer, head, pools[r], :n]``; what follows in that line is left as it was. The
    first `sink` and the last `recent` positions of the prefix rank above all others; among equal keys the
    lowest position wins. n itself is not written.

    Args:
        keys: [L, capacity] or [L, H, capacity]; int16 sortable keys or int32 fixed-point sums, neither ever
            negative; sums are ranked by ``float32 bits >> 15``.
        offset: int64 [R], where the row's keys stand in the last dimension; negative: the row is skipped.
        prefix: int32 [R], number of keys; 0 or less: the row is skipped. Fastest up to `tile` - 8 keys.
        pools: int32 [R], the row's index in `selected`; distinct for rows that are not skipped.
        selected: int32 [L, H, rows of the state, width], H = 1 for keys [L, capacity].
        ratio_ppm: budget in parts per million of the prefix. min_tokens, sink, recent: tokens.
        clear: zero the keys of every row that is not skipped, for sums that accumulate anew.
        tile, long_tile, num_warps: launch tunables. Lines of more than `tile` - 8 keys are walked in pieces
            of `long_tile` (1024 or more, by default up to 4096; at most 1023 pieces a line); powers of
            two, up to 32768.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
    """
    _check_select(keys, offset, prefix, pools, selected, ratio_ppm, min_tokens, sink, recent)
    long_tile = long_tile or max(min(tile, 4096), 1024)
    for name, value, least in (("tile", tile, 64), ("long_tile", long_tile, 1024)):
        if not least <= value <= MAX_TILE or value & (value - 1):
            raise ValueError(f"{name} is {value}; it must be a power of two, {least} to {MAX_TILE}.")
    heads = keys.shape[1] if keys.dim() == 3 else 1
    rows = prefix.shape[0]
    if rows == 0:
        return
    vec = 16 // keys.element_size()
    stride_kh = keys.stride(1) if keys.dim() == 3 else 0
    if keys.data_ptr() % 16 or keys.stride(0) % vec or stride_kh % vec or keys.shape[-1] % vec:
        vec = 1  # a load of whole vectors could leave the buffer
    fixed_point = keys.dtype == torch.int32
    _select_kernel[(rows, keys.shape[0] * heads)](
        keys, offset, prefix, pools, selected, keys.stride(0), stride_kh,
        selected.stride(0), selected.stride(1), selected.stride(2), heads,
        ratio_ppm, min_tokens, sink, recent, selected.shape[3],
        TOP=1 << (16 if fixed_point else 15), TILE=tile, LONG_TILE=long_tile, VEC=vec, CLEAR=clear,
        num_warps=num_warps,
    )  # fmt: skip
