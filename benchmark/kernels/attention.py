"""Attention of verify and draft rows: FA3, FlashInfer and this project's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rows import Rows, check_output, reference_lse
from shapes import score_shift

Launch = Callable[[int], object]
WORKSPACE_BYTES = 256 << 20


class NotHereError(Exception):
    """A kernel that this machine cannot run. The text says why."""


@dataclass(frozen=True)
class Case:
    """One thing to time: `make()` prepares it, checks its result and returns the launch.

    `make` may raise ImportError or NotHereError (skipped), or anything else (reported).
    """

    group: str
    shape: str
    kernel: str
    bytes: int
    make: Callable[[], Launch] = field(repr=False)


def needs_cuda(rows: Rows) -> None:
    """Raises NotHereError on a CPU."""
    if rows.q.device.type != "cuda":
        raise NotHereError("needs a CUDA device")


def checked(rows: Rows, launch: Callable[[int], torch.Tensor]) -> Launch:
    """`launch` itself, once its output was found right."""
    check_output(rows, launch(0))
    return launch


def fa3(rows: Rows, num_splits: int) -> Launch:
    """FlashAttention 3 over a page table of page size 1; `num_splits` 0 lets it choose."""
    needs_cuda(rows)
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    shape, pool = rows.shape, rows.pool
    k = pool.k.view(pool.slots, 1, shape.kv_heads, shape.dim)
    v = pool.v.view(pool.slots, 1, shape.kv_heads, shape.dim)
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=pool.device) * shape.queries
    lengths = rows.first + rows.queries

    def launch(i: int) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q=rows.q,
            k_cache=k,
            v_cache=v,
            page_table=rows.table(i),
            cache_seqlens=lengths,
            cu_seqlens_q=starts,
            max_seqlen_q=shape.queries,
            softmax_scale=rows.scale,
            causal=True,
            num_splits=num_splits,
        )

    return checked(rows, launch)


def flashinfer(rows: Rows, *, tensor_cores: bool) -> Launch:
    """FlashInfer's paged decode wrapper; one plan, another index buffer for each launch."""
    needs_cuda(rows)
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    shape, pool = rows.shape, rows.pool
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    indices = [table[:, : shape.keys].flatten() for table in rows.tables]
    more: dict[str, Any] = {"q_len_per_req": shape.queries} if shape.queries > 1 else {}
    wrapper.plan(
        torch.arange(shape.rows + 1, dtype=torch.int32) * shape.keys,
        indices[0],
        torch.ones(shape.rows, dtype=torch.int32),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        1,
        q_data_type=pool.dtype,
        kv_data_type=pool.dtype,
        sm_scale=rows.scale,
        **more,
    )
    cache = (pool.k[:, None], pool.v[:, None])

    def launch(i: int) -> torch.Tensor:
        wrapper._paged_kv_indices_buf = indices[i % len(indices)]
        return wrapper.run(rows.q, cache)

    return checked(rows, launch)


def ours(rows: Rows, scores: str | None = None) -> Launch:
    """`sgl_kernel_ext.cuda.verify_attention`; scores of scope `scores`, if given, in the same pass."""
    needs_cuda(rows)
    from sgl_kernel_ext.cuda import verify_attention

    shape = rows.shape
    out = torch.empty_like(rows.q)
    lse = torch.empty(shape.heads, len(rows.q), dtype=torch.float32, device=rows.q.device)
    more: dict[str, Any] = {}
    if scores is not None:
        size = (rows.capacity,) if scores == "layer" else (shape.kv_heads, rows.capacity)
        estimate = reference_lse(rows).T.reshape(shape.rows, shape.queries, shape.heads).contiguous()
        more = {
            "ref_lse": estimate,
            "offset": rows.offset,
            "prefix": rows.first,
            "score": torch.zeros(size, dtype=torch.int32, device=rows.q.device),
            "shift": score_shift(shape),
            "scope": scores,
        }

    def launch(i: int) -> torch.Tensor:
        # Scores of repeated launches add up and wrap, which costs the same.
        verify_attention(
            rows.q,
            rows.pool.k,
            rows.pool.v,
            rows.table(i),
            rows.first,
            rows.queries,
            padded_queries=shape.queries,
            scale=rows.scale,
            out=out,
            lse=lse,
            **more,
        )
        return out

    return checked(rows, launch)


def verify_cases(rows: Rows) -> list[Case]:
    """Alternatives for verify rows; those with scores read nothing more than those without."""
    size, name = rows.shape.attention_bytes, rows.shape.name
    made: dict[str, Callable[[], Launch]] = {
        "FA3": lambda: fa3(rows, 0),
        "ours": lambda: ours(rows),
        "ours + scores": lambda: ours(rows, "layer"),
        "ours + scores per KV head": lambda: ours(rows, "kv_head"),
        "FlashInfer": lambda: flashinfer(rows, tensor_cores=True),
    }
    return [Case("verify attention", name, kernel, size, make) for kernel, make in made.items()]


def draft_cases(rows: Rows, name: str) -> list[Case]:
    """Alternatives for draft rows: one query token and few keys."""
    made: dict[str, Callable[[], Launch]] = {
        "FA3": lambda: fa3(rows, 0),
        "FA3, 1 split": lambda: fa3(rows, 1),
        "FA3, 2 splits": lambda: fa3(rows, 2),
        "FA3, 4 splits": lambda: fa3(rows, 4),
        "ours": lambda: ours(rows),
        "FlashInfer, CUDA cores": lambda: flashinfer(rows, tensor_cores=False),
        "FlashInfer, tensor cores": lambda: flashinfer(rows, tensor_cores=True),
    }
    size = rows.shape.attention_bytes
    return [Case("draft attention", name, kernel, size, make) for kernel, make in made.items()]
