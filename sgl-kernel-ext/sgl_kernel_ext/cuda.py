"""Verification attention for Hopper that emits scores in the same pass: K and V are read once.

    reason = supported(head_dim, group, padded_queries, torch.bfloat16, device)  # None: go ahead
    size = workspace_size(head_dim, group, padded_queries, device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    out, lse = verify_attention(q, k_cache, v_cache, page_table, first, queries, padded_queries=9,
                                scale=head_dim**-0.5, workspace=workspace)

The first call compiles the kernels with nvcc (see `cuda_build`). All lengths are read on the device and the
grid is constant: a launch can be captured in a CUDA graph and replayed with other lengths. Two launches that
share a workspace must not run at the same time. Sources: csrc/verify_attention.cuh and what it includes.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from sgl_kernel_ext import cuda_build

HEAD_DIMS = (64, 128)
MAX_GROUP = 128
MAX_SHIFT = 22
SCOPES = ("layer", "kv_head")
DEPENDENT_MERGE, DEPENDENT_VERIFY, EQUAL_RANGES = 1, 2, 4  # SparseSpecVerifyFlags


def supported(
    head_dim: int, group: int, padded_queries: int, dtype: torch.dtype, device: torch.device | str
) -> str | None:
    """Why the kernel cannot serve this shape on this device, or None if it can. Compiles nothing."""
    device = torch.device(device)
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, allowed: {HEAD_DIMS}"
    if not 1 <= group <= MAX_GROUP:
        return f"a KV head has {group} query heads, allowed: 1 to {MAX_GROUP}"
    if padded_queries < 1:
        return f"padded_queries is {padded_queries}, allowed: 1 or more"
    if dtype != torch.bfloat16:
        return f"dtype is {dtype}, allowed: torch.bfloat16"
    return cuda_build.missing(device)


@functools.cache
def workspace_size(head_dim: int, group: int, padded_queries: int, device: torch.device | str) -> int:
    """Bytes of scratch memory of a launch, whatever the number of rows and their lengths (5 to 18 MB)."""
    device = torch.device(device)
    reason = supported(head_dim, group, padded_queries, torch.bfloat16, device)
    if reason:
        raise ValueError(f"verify_attention cannot run: {reason}")
    library = cuda_build.library()
    size = library.sparsespec_verify_workspace(head_dim, group, padded_queries, _index(device))
    if size < 0:
        raise ValueError(library.sparsespec_verify_error().decode())
    return size


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _check(name: str, tensor: torch.Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless the tensor is contiguous with this dtype and shape (None: any size)."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, contiguous: "
            f"{tensor.is_contiguous()}; needed: {wanted} {dtype} on {device}, contiguous"
        )


def _check_queries(q: torch.Tensor, tokens: int) -> None:
    """Raise ValueError unless q is bf16 [tokens, Hq, D] whose tokens are dense rows at 16-byte boundaries."""
    _, heads, head_dim = q.shape
    dense = q.stride(2) == 1 and (heads == 1 or q.stride(1) == head_dim)
    aligned = q.stride(0) % 8 == 0 and q.stride(0) >= heads * head_dim and q.data_ptr() % 16 == 0
    if q.shape[0] != tokens or q.dtype != torch.bfloat16 or not dense or not aligned:
        raise ValueError(
            f"q is {list(q.shape)} {q.dtype} with strides {q.stride()}, {q.data_ptr() % 16} bytes off a "
            f"multiple of 16; needed: [{tokens}, {heads}, {head_dim}] torch.bfloat16 at a multiple of 16, "
            f"strides (a multiple of 8 from {heads * head_dim}, {head_dim}, 1): copy it with .contiguous()"
        )


def _check_inputs(q, k_cache, v_cache, page_table, first, queries, padded_queries) -> tuple[int, int]:
    """Return (rows, KV heads) after checking the tensors that are always there."""
    device = q.device
    if q.dim() != 3 or k_cache.dim() != 3:
        raise ValueError(
            f"q is {list(q.shape)} and k_cache {list(k_cache.shape)}; "
            "needed: [rows * padded_queries, Hq, D] and [slots, Hkv, D]"
        )
    rows, kv_heads = first.shape[0], k_cache.shape[1]
    _, q_heads, head_dim = q.shape
    if q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads and k_cache {kv_heads}: the second must divide the first")
    reason = supported(head_dim, q_heads // kv_heads, padded_queries, q.dtype, device)
    if reason:
        raise ValueError(f"verify_attention cannot run: {reason}")
    _check_queries(q, rows * padded_queries)
    _check("k_cache", k_cache, (None, kv_heads, head_dim), torch.bfloat16, device)
    _check("v_cache", v_cache, tuple(k_cache.shape), torch.bfloat16, device)
    _check("first", first, (rows,), torch.int32, device)
    _check("queries", queries, (rows,), torch.int32, device)
    if page_table.dim() != 2 or page_table.shape[0] != rows or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table is {list(page_table.shape)} {page_table.dtype}; needed: [{rows}, *] torch.int32"
        )
    if page_table.device != device or page_table.stride(1) != 1:
        raise ValueError(
            f"page_table is on {page_table.device} with strides {page_table.stride()}; "
            f"needed: on {device}, last stride 1"
        )
    return rows, kv_heads


def _check_scores(score, ref_lse, offset, prefix, shift, scope, lines: tuple, kv_heads: int) -> None:
    """Check the arguments of the score output; `lines` is the shape of ref_lse."""
    if ref_lse is None or offset is None or prefix is None or shift is None:
        raise ValueError("score needs ref_lse, offset, prefix and shift: pass all five or none")
    if scope not in SCOPES:
        raise ValueError(f"scope is {scope!r}, allowed: {SCOPES}")
    if not 0 <= shift <= MAX_SHIFT:
        raise ValueError(f"shift is {shift}, allowed: 0 to {MAX_SHIFT}")
    device, rows, padded_queries, q_heads = ref_lse.device, *lines
    heads = q_heads if scope == "layer" else q_heads // kv_heads
    if padded_queries * heads << shift >= 2**31:
        raise ValueError(
            f"{padded_queries} queries of {heads} heads with shift {shift} can exceed an int32 score: "
            f"use a shift of at most {((2**31 - 1) // (padded_queries * heads)).bit_length() - 1}"
        )
    _check("ref_lse", ref_lse, lines, torch.float32, device)
    _check("offset", offset, (rows,), torch.int64, device)
    _check("prefix", prefix, (rows,), torch.int32, device)
    _check("score", score, (None,) if scope == "layer" else (kv_heads, None), torch.int32, device)


def verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    first: torch.Tensor,
    queries: torch.Tensor,
    *,
    padded_queries: int,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    ref_lse: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    score: torch.Tensor | None = None,
    shift: int | None = None,
    scope: str = "layer",
    workspace: torch.Tensor | None = None,
    dependent_launch: bool = True,
    dependent_verify: bool = False,
    equal_ranges: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to `padded_queries` query tokens a row over the row's keys; returns (out, lse).

    R rows, Q = padded_queries, W logical positions a row. bf16: q [R*Q, Hq, D] (any token stride that is a
    multiple of 8, so that it can be a slice of a fused projection), k_cache and v_cache [slots, Hkv, D], out
    [R*Q, Hq, D] contiguous. int32: page_table [R, W] (any row stride), first [R], queries [R]. Query t of
    row r stands at position first[r] + t and sees keys 0 .. first[r] + t. lse [Hq, R*Q] float32, natural log.
    Padding queries and empty rows (queries = 0) get out = 0 and lse = -inf.

    Scores, if `score` is given: int32 [capacity] (scope "layer") or [Hkv, capacity] ("kv_head"), cleared by
    the caller. Key j < prefix[r] of a row with offset[r] >= 0 adds
    2^shift * sum over queries and heads of min(1, exp(scale * q.k_j - ref_lse)) at offset[r] + j, rounded to
    an integer per KV head. ref_lse [R, Q, Hq] float32 estimates the LSE; -inf or NaN leaves a query out.
    offset [R] int64, prefix [R] int32.

    workspace: uint8, at least `workspace_size(...)`; allocated if None (a CUDA graph keeps it in its pool).
    dependent_launch: the second of the two kernels is a programmatic dependent of the first.
    dependent_verify: the first is one of the kernel before it in the stream; only safe if that kernel, where
    it was launched as a dependent itself, waited for its own predecessor.
    equal_ranges: never give a CTA whole rows and heads, which saves the merge of short rows; for comparisons.
    Raises ValueError for shapes or a device that the kernel cannot serve, RuntimeError where compiling fails.
    """
    rows, kv_heads = _check_inputs(q, k_cache, v_cache, page_table, first, queries, padded_queries)
    tokens, q_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q_heads, tokens, dtype=torch.float32, device=q.device) if lse is None else lse
    _check("out", out, tuple(q.shape), torch.bfloat16, q.device)
    _check("lse", lse, (q_heads, tokens), torch.float32, q.device)
    if score is None:
        ref_lse = offset = prefix = None
    else:
        lines = (rows, padded_queries, q_heads)
        _check_scores(score, ref_lse, offset, prefix, shift, scope, lines, kv_heads)
    if workspace is None:
        size = workspace_size(head_dim, q_heads // kv_heads, padded_queries, q.device)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    _check("workspace", workspace, (None,), torch.uint8, q.device)
    tensors = (
        q,
        k_cache,
        v_cache,
        page_table,
        first,
        queries,
        out,
        lse,
        ref_lse,
        offset,
        prefix,
        score,
        workspace,
    )
    flags = DEPENDENT_MERGE * bool(dependent_launch) | DEPENDENT_VERIFY * bool(dependent_verify)
    flags |= EQUAL_RANGES * bool(equal_ranges)
    numbers = (padded_queries, float(scale), shift or 0, flags)
    function = cuda_build.tvm_function("verify_attention")
    with torch.cuda.device(q.device):
        if function is not None:
            function(*tensors, *numbers)
        else:
            _call(tensors, *numbers)
    return out, lse


def _call(tensors: tuple, padded_queries: int, scale: float, shift: int, flags: int) -> None:
    """Launch through ctypes, for machines without tvm_ffi."""
    q, k_cache, _, page_table, first, _, _, _, _, _, _, score, workspace = tensors
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    by_head = score is not None and score.dim() == 2
    device = _index(q.device)
    args = cuda_build.VerifyArgs(
        *pointers,
        workspace.numel(),
        q.stride(0),
        page_table.stride(0),
        0 if score is None else score.shape[-1],
        score.stride(0) if by_head else 0,
        first.shape[0],
        padded_queries,
        q.shape[1],
        k_cache.shape[1],
        q.shape[2],
        page_table.shape[1],
        scale,
        shift,
        device,
        flags,
        torch.cuda.current_stream(device).cuda_stream,
    )
    library = cuda_build.library()
    if library.sparsespec_verify_attention(ctypes.byref(args)):
        raise RuntimeError(library.sparsespec_verify_error().decode())
