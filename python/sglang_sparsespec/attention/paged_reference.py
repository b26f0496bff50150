"""Paged attention in plain torch: the reference of the CUDA-graph path, row by row."""

from __future__ import annotations

import torch

from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged import PagedAttention, ScoredRows, ScoreTarget


class TorchPagedAttention(PagedAttention):
    """Slow and obvious; reads lengths on the host. Scores while it verifies, as the fused kernel does."""

    name = "torch_paged"
    fuses_scores = True

    def draft(
        self, layer: LayerKV, q: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, dim = q.shape
        index_heads = pages.shape[1]
        group = heads // index_heads
        out, lse = torch.zeros_like(q), torch.full((rows, heads), float("-inf"), device=q.device)
        k, v = (t.reshape(-1, t.shape[1] // index_heads, dim) for t in (layer.k, layer.v))
        for row, length in enumerate(lengths.tolist()):
            for head in range(index_heads if length else 0):
                slots = pages[row, head, :length].long()
                mine = slice(head * group, (head + 1) * group)
                some, its_lse = _attend(q[row : row + 1, mine], k[slots], v[slots], layer.scale)
                out[row, mine], lse[row, mine] = some[0], its_lse[:, 0]
        return out, lse

    def verify(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        most_queries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros_like(q)
        lse = torch.full((q.shape[1], len(q)), float("-inf"), device=q.device)
        bounds = starts.tolist()
        for row, length in enumerate(lengths.tolist()):
            if not length:
                continue
            mine = slice(bounds[row], bounds[row + 1])
            slots = pages[row, :length].long()
            out[mine], lse[:, mine] = _attend(q[mine], layer.k[slots], layer.v[slots], layer.scale)
        return out, lse

    def verify_scored(
        self,
        layer: LayerKV,
        q: torch.Tensor,
        pages: torch.Tensor,
        rows: ScoredRows,
        target: ScoreTarget,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros_like(q)
        lse = torch.full((q.shape[1], len(q)), float("-inf"), device=q.device)
        for row, (first, real) in enumerate(zip(rows.first.tolist(), rows.real.tolist(), strict=True)):
            if not real:
                continue
            mine = slice(row * rows.queries, row * rows.queries + real)
            slots = pages[row, : first + real].long()
            k = layer.k[slots]
            out[mine], lse[:, mine] = _attend(q[mine], k, layer.v[slots], layer.scale)
            if rows.offset[row] >= 0:
                sums = _score_sums(q[mine], k, layer.scale, target, target.reference_lse[row, :real])
                place = slice(int(rows.offset[row]), int(rows.offset[row]) + int(rows.prefix[row]))
                target.sums[..., place] += sums[..., : place.stop - place.start]
        return out, lse


def _score_sums(
    q: torch.Tensor, k: torch.Tensor, scale: float, target: ScoreTarget, reference_lse: torch.Tensor
) -> torch.Tensor:
    """Fixed-point scores of a row's keys, [L] or [KV heads, L] int32; rounded for each KV head."""
    queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    k = k.repeat_interleave(heads // kv_heads, dim=1).float()
    scores = torch.einsum("qhd,lhd->qhl", q.float(), k) * scale
    likely = torch.exp(scores - reference_lse[..., None]).clamp(max=1.0)
    last = len(k) - queries + torch.arange(queries, device=q.device)
    sees = torch.arange(len(k), device=q.device) <= last[:, None]
    known = reference_lse.isfinite()[..., None]
    likely = torch.where(sees[:, None] & known, likely, 0.0)
    by_head = likely.unflatten(1, (kv_heads, -1)).sum(dim=(0, 2))
    sums = torch.round(by_head * float(1 << target.shift)).to(torch.int32)
    return sums if target.scope == "kv_head" else sums.sum(dim=0, dtype=torch.int32)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Q, H, D] over k, v [L, KV heads, D], the last query seeing all. Returns out and LSE [H, Q]."""
    queries, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).float() for t in (k, v))
    scores = torch.einsum("qhd,lhd->hql", q.float(), k) * scale
    sees = (
        torch.arange(len(k), device=q.device)
        <= (len(k) - queries + torch.arange(queries, device=q.device))[:, None]
    )
    scores = scores.masked_fill(~sees, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = torch.einsum("hql,lhd->qhd", torch.exp(scores - lse[..., None]), v)
    return out.to(q.dtype), lse
