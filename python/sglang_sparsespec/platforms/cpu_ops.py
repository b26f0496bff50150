"""Torch versions of the Triton ops that SGLang's scheduler launches once a speculative algorithm is on.

Each has the in-tree signature, so it can stand in for the in-tree function.
"""

from collections.abc import Callable
from typing import Any

import torch


def cpu_op_replacements() -> dict[str, Callable[..., Any]]:
    """Return {dotted name of the in-tree function: its torch version}, for HookRegistry REPLACE hooks.

    `assign_extend_cache_locs` is not among them: SGLang asks the platform for it.
    """
    return {
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": assign_req_to_token_pool,
        "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras": gather_spec_extras,
    }


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into the page table, in place.

    Args:
        req_pool_indices: [bs] int, page-table row of each request.
        req_to_token: [rows, max_context] int32, the page table; row r gets columns [start, end) written.
        start_offset: [bs] int, first column to write.
        end_offset: [bs] int, one past the last column to write.
        out_cache_loc: [>= sum(end - start)] int, the slots, request after request.
        batch_size: bs.

    Raises:
        ValueError: `out_cache_loc` holds fewer slots than the rows take.
    """
    spans = _spans(req_pool_indices[:batch_size], start_offset, end_offset)
    needed = sum(end - start for _, start, end in spans)
    if needed > out_cache_loc.numel():
        raise ValueError(
            f"out_cache_loc holds {out_cache_loc.numel()} slots but {needed} are to be assigned; "
            f"allocate sum(end_offset - start_offset) of them."
        )
    taken = 0
    for row, start, end in spans:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gather the rows `indices` [bs] of each relay buffer [pool, ...]; the results [bs, ...] are copies."""
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden_states


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Read the slots of columns [start, end) of each request's page-table row.

    Returns:
        [batch_size * draft_token_num] int64 on `device`; where the spans are shorter, the tail is zero.
    """
    slots = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    written = 0
    for row, start, end in _spans(req_pool_indices[:batch_size], start_offset, end_offset):
        slots[written : written + end - start] = req_to_token[row, start:end]
        written += end - start
    return slots


def _spans(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> list[tuple[int, int, int]]:
    # `rows` is cut to the batch; the offsets may be longer. The kernels take end < start as an empty span.
    triples = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False)
    return [(row, start, max(start, end)) for row, start, end in triples]
