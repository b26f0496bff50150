"""The kernels of `rounds.py` in plain torch: slow, obvious, on any device. Same arguments, same effects."""

from __future__ import annotations

import torch

from sgl_kernel_ext.buffers import LOOK_UP_TAIL, SCORE_ALIGN, MicroStepBuffers, RequestTensors
from sgl_kernel_ext.reference import key16, scores, select, selected_count

__all__ = [
    "draft_pages",
    "finish_greedy",
    "look_up",
    "prepare",
    "score_keys",
    "select",
    "settle",
    "verify_pages",
]


def prepare(step: MicroStepBuffers, state: RequestTensors, *, page_width: int, capacity: int) -> None:
    micro = int(step.header[0])
    step.input_ids.zero_()
    step.positions.zero_()
    step.out_cache_loc.zero_()
    for slot in range(step.nd):
        pool, drafted, _ = step.table[micro, 0, slot].tolist()
        at = int(state.committed[pool]) + drafted if pool else 0
        kept = int(state.selected_len[pool]) + at - int(state.selected_base[pool]) + 1
        step.draft_pool[slot] = pool
        step.draft_at[slot] = drafted
        step.draft_len[slot] = min(kept, page_width) if pool else 0
        step.positions[slot] = at
        if pool:
            step.input_ids[slot] = state.tokens[pool, drafted]
            step.out_cache_loc[slot] = state.req_to_token[pool, at]
    start = 0
    for slot in range(step.nv):
        pool, drafted, _ = step.table[micro, 1, slot].tolist()
        first = int(state.committed[pool]) if pool else 0
        step.verify_pool[slot] = pool
        step.first[slot] = first
        step.verify_queries[slot] = drafted + 1 if pool else 0
        step.seqlens[slot] = first + step.queries if pool else 0
        step.offset[slot] = start if pool and start + first <= capacity else -1
        start += -(-first // SCORE_ALIGN) * SCORE_ALIGN
        for t in range(step.queries):
            token = step.nd + slot * step.queries + t
            step.positions[token] = first + t
            if pool and t <= drafted:
                step.input_ids[token] = state.tokens[pool, t]
                step.out_cache_loc[token] = state.req_to_token[pool, first + t]


def draft_pages(step: MicroStepBuffers, state: RequestTensors, pages: torch.Tensor) -> None:
    groups, heads, _, _ = state.selected.shape
    for slot in range(step.nd):
        pool, length = int(step.draft_pool[slot]), int(step.draft_len[slot])
        chosen = min(int(state.selected_len[pool]), length)
        last = int(step.positions[slot])
        since = torch.arange(last - (length - chosen) + 1, last + 1, device=pages.device)
        for group in range(groups):
            for head in range(heads):
                at = torch.cat([state.selected[group, head, pool, :chosen].long(), since])
                page = state.req_to_token[pool, at]
                pages[group, slot, head, :length] = page * heads + head if heads > 1 else page


def verify_pages(step: MicroStepBuffers, state: RequestTensors, pages: torch.Tensor) -> None:
    for slot in range(step.nv):
        length = int(step.seqlens[slot])
        pages[slot, :length] = state.req_to_token[int(step.verify_pool[slot]), :length]


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
    for pool, length, start in zip(pools.tolist(), prefix.tolist(), offset.tolist(), strict=True):
        if pool > 0 and length > 0 and start >= 0:
            budget = selected_count(
                length,
                ratio_ppm=ratio_ppm,
                min_tokens=min_tokens,
                sink=kept,
                recent=0,
                width=state.selected.shape[3],
            )
            chosen = budget if window_sink < 0 else min(window_sink, budget)
            state.selected_len[pool] = chosen
            state.selected_base[pool] = length - (budget - chosen)


def finish_greedy(
    step: MicroStepBuffers,
    state: RequestTensors,
    picked: torch.Tensor,
    out_tokens: torch.Tensor,
    out_len: torch.Tensor,
) -> None:
    micro = int(step.header[0])
    if not int(step.header[1]):
        return
    for slot in range(step.nd):
        pool, drafted, _ = step.table[micro, 0, slot].tolist()
        if pool:
            state.tokens[pool, drafted + 1] = picked[slot]
    for slot in range(step.nv):
        pool, drafted, request = step.table[micro, 1, slot].tolist()
        if not pool:
            continue
        target = picked[step.nd + slot * step.queries :][: step.queries].tolist()
        drafts = state.tokens[pool, 1 : drafted + 1].tolist()
        accepted = 0
        while accepted < drafted and drafts[accepted] == target[accepted]:
            accepted += 1
        tokens = [*drafts[:accepted], target[accepted]]
        out_tokens[request, : len(tokens)] = torch.tensor(tokens, device=out_tokens.device)
        out_len[request] = len(tokens)
        state.tokens[pool, 0] = tokens[-1]
        state.committed[pool] += len(tokens)


def look_up(
    step: MicroStepBuffers, state: RequestTensors, history: torch.Tensor, *, most: int, least: int
) -> None:
    micro = int(step.header[0])
    for slot in range(step.nv):
        pool, drafted, _ = step.table[micro, 1, slot].tolist()
        wanted = most - drafted
        if not pool or wanted <= 0:
            continue
        past = history[pool, : int(state.committed[pool]) + 1].tolist()
        tail = (past + state.tokens[pool, 1 : drafted + 1].tolist())[-LOOK_UP_TAIL:]
        best = (0, -1)
        for at in range(len(past) - wanted):
            length = 0
            while length < min(len(tail), at + 1) and past[at - length] == tail[-1 - length]:
                length += 1
            best = max(best, (length, at))
        if best[0] >= least:
            found = past[best[1] + 1 :][:wanted]
            state.tokens[pool, drafted + 1 : most + 1] = torch.tensor(found, device=state.tokens.device)
            step.table[micro, 1, slot, 1] = most


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
    scope: str,
    k_scale: float = 1.0,
) -> None:
    values = scores(
        q,
        k_cache,
        lse,
        page_table,
        first,
        queries,
        prefix,
        offset,
        padded_queries=padded_queries,
        scale=scale,
        scope=scope,
        capacity=out.shape[-1],
        k_scale=k_scale,
    )
    out.copy_(key16(values))
