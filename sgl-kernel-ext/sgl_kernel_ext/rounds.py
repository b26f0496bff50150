"""Round metadata, page tables and greedy acceptance as Triton kernels: a micro-step without host arithmetic.

The host uploads one table a round (which request drafts or verifies in which slot, `RowTable`); all lengths
live on the device, so that one CUDA graph serves any batch that fits its slots. `rounds_reference.py` says
the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.buffers import LOOK_UP_TAIL, SCORE_ALIGN, MicroStepBuffers, RequestTensors
from sgl_kernel_ext.select import budget_of

PAGE_BLOCK = 1024
LOOK_UP_BLOCK = 1024


@triton.jit
def _prepare_kernel(
    HEAD,
    TABLE,
    COMMITTED,
    TOKENS,
    SEL_LEN,
    SEL_BASE,
    REQ_TO_TOKEN,
    IDS,
    POSITIONS,
    LOC,
    D_POOL,
    D_LEN,
    D_AT,
    V_POOL,
    FIRST,
    QUERIES,
    SEQLENS,
    OFFSET,
    stride_tokens,
    stride_rt,
    slots,
    nd,
    nv,
    width,
    capacity,
    Q: tl.constexpr,
    QP: tl.constexpr,
    NVP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    pid = tl.program_id(0)
    micro = tl.load(HEAD)
    if pid < nd:
        row = TABLE + ((micro * 2) * slots + pid) * 3
        pool = tl.load(row).to(tl.int64)
        drafted = tl.load(row + 1)
        real = pool > 0
        at = tl.where(real, tl.load(COMMITTED + pool) + drafted, 0)
        kept = tl.load(SEL_LEN + pool) + at - tl.load(SEL_BASE + pool) + 1
        tl.store(D_POOL + pid, pool.to(tl.int32))
        tl.store(D_LEN + pid, tl.where(real, tl.minimum(kept, width), 0).to(tl.int32))
        tl.store(D_AT + pid, drafted)
        tl.store(IDS + pid, tl.load(TOKENS + pool * stride_tokens + drafted, mask=real, other=0))
        tl.store(POSITIONS + pid, at)
        tl.store(LOC + pid, tl.load(REQ_TO_TOKEN + pool * stride_rt + at, mask=real, other=0).to(tl.int64))
    else:
        slot = pid - nd
        rows = TABLE + ((micro * 2 + 1) * slots) * 3
        pool = tl.load(rows + slot * 3).to(tl.int64)
        drafted = tl.load(rows + slot * 3 + 1)
        real = pool > 0
        first = tl.where(real, tl.load(COMMITTED + pool), 0)
        t = tl.arange(0, QP)
        inside = t < Q
        mine = (t <= drafted) & inside & real
        token = nd + slot * Q + t
        tl.store(IDS + token, tl.load(TOKENS + pool * stride_tokens + t, mask=mine, other=0), mask=inside)
        tl.store(POSITIONS + token, first + t, mask=inside)
        loc = tl.load(REQ_TO_TOKEN + pool * stride_rt + first + t, mask=mine, other=0)
        tl.store(LOC + token, loc.to(tl.int64), mask=inside)
        tl.store(V_POOL + slot, pool.to(tl.int32))
        tl.store(FIRST + slot, first.to(tl.int32))
        tl.store(QUERIES + slot, tl.where(real, drafted + 1, 0))
        tl.store(SEQLENS + slot, tl.where(real, first + Q, 0).to(tl.int32))
        other = tl.arange(0, NVP)
        pools = tl.load(rows + other * 3, mask=other < nv, other=0).to(tl.int64)
        lengths = tl.load(COMMITTED + pools, mask=pools > 0, other=0)
        padded = (lengths + ALIGN - 1) // ALIGN * ALIGN
        start = tl.sum(tl.where(other < slot, padded, 0), 0)
        tl.store(OFFSET + slot, tl.where(real & (start + first <= capacity), start, -1))


def prepare(step: MicroStepBuffers, state: RequestTensors, *, page_width: int, capacity: int) -> None:
    """Fill a micro-step's inputs from the uploaded table and the requests' state.

    Args:
        page_width: most keys a draft row attends to; the oldest tokens since its selection are left out
            beyond that.
        capacity: keys that the score buffer holds.
    """
    if step.nd + step.nv == 0:
        return
    _prepare_kernel[(step.nd + step.nv,)](
        step.header,
        step.table,
        state.committed,
        state.tokens,
        state.selected_len,
        state.selected_base,
        state.req_to_token,
        step.input_ids,
        step.positions,
        step.out_cache_loc,
        step.draft_pool,
        step.draft_len,
        step.draft_at,
        step.verify_pool,
        step.first,
        step.verify_queries,
        step.seqlens,
        step.offset,
        state.tokens.stride(0),
        state.req_to_token.stride(0),
        step.table.shape[2],
        step.nd,
        step.nv,
        page_width,
        capacity,
        Q=step.queries,
        QP=triton.next_power_of_2(step.queries),
        NVP=triton.next_power_of_2(max(step.nv, 2)),
        ALIGN=SCORE_ALIGN,
    )


@triton.jit
def _draft_pages_kernel(
    SELECTED,
    SEL_LEN,
    REQ_TO_TOKEN,
    D_POOL,
    D_LEN,
    POSITIONS,
    PAGES,
    stride_rt,
    rows,
    cap,
    slots,
    width,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)  # group * H + head
    pool = tl.load(D_POOL + slot).to(tl.int64)
    length = tl.load(D_LEN + slot)
    chosen = tl.load(SEL_LEN + pool)
    last = tl.load(POSITIONS + slot)
    out = PAGES + (((line // H) * slots + slot) * H + line % H) * width
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < length
        picked = tl.load(
            SELECTED + (line * rows + pool) * cap + column, mask=inside & (column < chosen), other=0
        )
        at = tl.where(column < chosen, picked.to(tl.int64), last - (length - 1 - column))
        page = tl.load(REQ_TO_TOKEN + pool * stride_rt + at, mask=inside, other=0)
        if H > 1:
            page = page * H + (line % H).to(tl.int32)
        tl.store(out + column, page, mask=inside)


def draft_pages(step: MicroStepBuffers, state: RequestTensors, pages: torch.Tensor) -> None:
    """Page tables of the draft rows for all layers: the selection, then all tokens since it was made.

    Args:
        pages: [groups, slots, H, width] int32; with H > 1 (a selection per KV head) entries are
            `slot * H + head`, for a pool viewed as [slots * H, 1, D].
    """
    if step.nd == 0:
        return
    groups, heads, rows, cap = state.selected.shape
    _draft_pages_kernel[(step.nd, groups * heads)](
        state.selected,
        state.selected_len,
        state.req_to_token,
        step.draft_pool,
        step.draft_len,
        step.positions,
        pages,
        state.req_to_token.stride(0),
        rows,
        cap,
        pages.shape[1],
        pages.shape[3],
        H=heads,
        BLOCK=PAGE_BLOCK,
    )


@triton.jit
def _verify_pages_kernel(REQ_TO_TOKEN, V_POOL, SEQLENS, PAGES, stride_rt, stride_pages, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < tl.load(SEQLENS + slot)
    pool = tl.load(V_POOL + slot).to(tl.int64)
    page = tl.load(REQ_TO_TOKEN + pool * stride_rt + column, mask=inside, other=0)
    tl.store(PAGES + slot.to(tl.int64) * stride_pages + column, page, mask=inside)


def verify_pages(step: MicroStepBuffers, state: RequestTensors, pages: torch.Tensor) -> None:
    """Page table of the verify rows: a copy of their whole rows, [slots, W] int32."""
    if step.nv == 0:
        return
    _verify_pages_kernel[(step.nv, triton.cdiv(pages.shape[1], PAGE_BLOCK))](
        state.req_to_token,
        step.verify_pool,
        step.seqlens,
        pages,
        state.req_to_token.stride(0),
        pages.stride(0),
        BLOCK=PAGE_BLOCK,
    )


@triton.jit
def _settle_kernel(POOL, PREFIX, OFFSET, SEL_LEN, SEL_BASE, ratio_ppm, min_tokens, kept, cap, window_sink):
    slot = tl.program_id(0)
    pool = tl.load(POOL + slot).to(tl.int64)
    prefix = tl.load(PREFIX + slot)
    if (pool > 0) & (prefix > 0) & (tl.load(OFFSET + slot) >= 0):
        budget = budget_of(prefix, ratio_ppm, min_tokens, kept, cap)
        length = tl.where(window_sink < 0, budget, tl.minimum(window_sink, budget))
        tl.store(SEL_LEN + pool, length.to(tl.int64))
        tl.store(SEL_BASE + pool, (prefix - (budget - length)).to(tl.int64))


def settle(
    pools: torch.Tensor,
    prefix: torch.Tensor,
    offset: torch.Tensor,
    state: RequestTensors,
    *,
    ratio_ppm: int,
    min_tokens: int,
    kept: int,
    window_sink: int = -1,
) -> None:
    """Record the length and the base of selections just made. Rows that were not scored keep theirs.

    Args:
        pools, prefix: [R] int32. offset: [R] int64, negative for a row that was skipped.
        window_sink: 0 or more: the selection is the first `window_sink` positions (which `selected` must
            hold) and the rest of the budget is the latest tokens.
    """
    if len(pools) == 0:
        return
    _settle_kernel[(len(pools),)](
        pools,
        prefix,
        offset,
        state.selected_len,
        state.selected_base,
        ratio_ppm,
        min_tokens,
        kept,
        state.selected.shape[3],
        window_sink,
    )


@triton.jit
def _finish_kernel(
    HEAD,
    TABLE,
    PICKED,
    COMMITTED,
    TOKENS,
    OUT_TOKENS,
    OUT_LEN,
    stride_tokens,
    stride_out,
    slots,
    nd,
    Q: tl.constexpr,
    QP: tl.constexpr,
):
    pid = tl.program_id(0)
    micro = tl.load(HEAD)
    greedy = tl.load(HEAD + 1) != 0
    if pid < nd:
        row = TABLE + ((micro * 2) * slots + pid) * 3
        pool = tl.load(row).to(tl.int64)
        drafted = tl.load(row + 1)
        picked = tl.load(PICKED + pid)
        tl.store(TOKENS + pool * stride_tokens + drafted + 1, picked, mask=greedy & (pool > 0))
    else:
        slot = pid - nd
        row = TABLE + ((micro * 2 + 1) * slots + slot) * 3
        pool = tl.load(row).to(tl.int64)
        drafted = tl.load(row + 1)
        request = tl.load(row + 2).to(tl.int64)
        real = greedy & (pool > 0)
        t = tl.arange(0, QP)
        target = tl.load(PICKED + nd + slot * Q + t, mask=t < Q, other=-1)
        draft = tl.load(TOKENS + pool * stride_tokens + t + 1, mask=t < drafted, other=-2)
        accepted = tl.min(tl.where(draft == target, QP, t), 0)
        bonus = tl.sum(tl.where(t == accepted, target, 0), 0)
        tl.store(
            OUT_TOKENS + request * stride_out + t,
            tl.where(t == accepted, bonus, draft),
            mask=real & (t <= accepted),
        )
        tl.store(OUT_LEN + request, (accepted + 1).to(tl.int64), mask=real)
        tl.store(TOKENS + pool * stride_tokens, bonus, mask=real)
        committed = tl.load(COMMITTED + pool)
        tl.store(COMMITTED + pool, committed + accepted + 1, mask=real)


def finish_greedy(
    step: MicroStepBuffers,
    state: RequestTensors,
    picked: torch.Tensor,
    out_tokens: torch.Tensor,
    out_len: torch.Tensor,
) -> None:
    """Store drafts and accept verifications by the most likely tokens. Does nothing when the header's greedy
    flag is 0.

    Args:
        picked: [T] int64, most likely token after each of the micro-step's tokens.
        out_tokens: [slots, k+1] int64, by row in the batch: accepted drafts, then the bonus token.
        out_len: [slots] int64, accepted drafts + 1.
    """
    if step.nd + step.nv == 0:
        return
    _finish_kernel[(step.nd + step.nv,)](
        step.header,
        step.table,
        picked,
        state.committed,
        state.tokens,
        out_tokens,
        out_len,
        state.tokens.stride(0),
        out_tokens.stride(0),
        step.table.shape[2],
        step.nd,
        Q=step.queries,
        QP=triton.next_power_of_2(step.queries),
    )


@triton.jit
def _look_up_kernel(
    HEAD,
    TABLE,
    COMMITTED,
    TOKENS,
    HISTORY,
    stride_tokens,
    stride_history,
    slots,
    most,
    least,
    MP: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0)
    row = TABLE + ((tl.load(HEAD) * 2 + 1) * slots + slot) * 3
    pool = tl.load(row).to(tl.int64)
    drafted = tl.load(row + 1)
    wanted = most - drafted
    if (pool > 0) & (wanted > 0):
        last = tl.load(COMMITTED + pool).to(tl.int32)  # where the last committed token stands
        history, tokens = HISTORY + pool * stride_history, TOKENS + pool * stride_tokens
        end = last - wanted + 1  # what follows a match must be there
        best = tl.zeros((), tl.int32) - 1
        for start in range(0, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            alive = at < end
            length = tl.zeros((BLOCK,), tl.int32)
            for back in tl.static_range(TAIL):
                if back <= drafted:
                    own = tl.load(tokens + drafted - back).to(tl.int32)
                else:
                    own = tl.load(history + tl.maximum(last + drafted - back, 0))
                there = tl.load(history + at - back, mask=alive & (at >= back), other=-1)
                alive = alive & (there == own) & (last + drafted >= back)
                length += alive.to(tl.int32)
            score = tl.where(length >= least, (length << 24) | at, -1)
            best = tl.maximum(best, tl.max(score, 0))
        if best >= 0:
            t = tl.arange(0, MP)
            found = tl.load(history + (best & 0xFFFFFF) + 1 + t, mask=t < wanted, other=0)
            tl.store(tokens + drafted + 1 + t, found.to(tl.int64), mask=t < wanted)
            tl.store(row + 1, most)


def look_up(
    step: MicroStepBuffers, state: RequestTensors, history: torch.Tensor, *, most: int, least: int
) -> None:
    """Add tokens to what the micro-step is about to verify: those that followed the longest earlier match of
    the latest tokens, the last one of several (prompt lookup decoding).

    A verification of the step's table gets `most` drafts where at least `least` tokens match, as many as
    LOOK_UP_TAIL are compared, and stays as it is where none do. Runs before `prepare`, and outside graphs.

    Args:
        history: [rows, W] int32, tokens of every request by position, up to the last committed one.
        most: drafts of a verification, at most k.
    """
    if step.nv == 0:
        return
    _look_up_kernel[(step.nv,)](
        step.header,
        step.table,
        state.committed,
        state.tokens,
        history,
        state.tokens.stride(0),
        history.stride(0),
        step.table.shape[2],
        most,
        least,
        MP=triton.next_power_of_2(most),
        TAIL=LOOK_UP_TAIL,
        BLOCK=LOOK_UP_BLOCK,
    )
