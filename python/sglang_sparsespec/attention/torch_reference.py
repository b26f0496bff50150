"""Plain-torch attention: the CPU path, the fallback on any device, and the reference of every test."""

from __future__ import annotations

from typing import TypeVar

import torch

from sglang_sparsespec.attention.interface import DraftRows, LayerKV, MicroStepAttention, VerifyRows

Rows = TypeVar("Rows", DraftRows, VerifyRows)

# Elements of K gathered at once where rows are scored one group after another.
GATHER_ELEMENTS = 1 << 27


def gather_heads(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """KV of every row and head. kv: [S, Hkv, D]; slots: [R, 1 or Hkv, L] int64. Returns [R, Hkv, L, D]."""
    if slots.shape[1] == 1:
        # index_select is several times faster than kv[slots] on a CPU.
        flat = kv.index_select(0, slots[:, 0].reshape(-1))
        return flat.view(*slots[:, 0].shape, *kv.shape[1:]).transpose(1, 2)
    heads = torch.arange(kv.shape[1], device=kv.device)
    return kv[slots, heads[:, None]]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    mask: torch.Tensor,
    layer: LayerKV,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Softmax attention in float32.

    Args:
        q: [R, Q, Hq, D]. k, v: [R, Hkv, L, D]; v None asks for the probabilities only.
        mask: [R, Q, L] bool, True where a query sees a key; every query sees one.
        layer: its scale and sinks.

    Returns:
        out [R, Q, Hq, D] in q's dtype (None without v), probabilities [R, Hkv, G, Q, L] float32.
    """
    rows, queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    flat = grouped.reshape(rows, kv_heads, -1, dim).float()
    logits = torch.matmul(flat, k.float().transpose(-1, -2)).mul_(layer.scale)
    logits = logits.view(rows, kv_heads, heads // kv_heads, queries, -1)
    logits.masked_fill_(~mask[:, None, None], float("-inf"))
    if layer.sinks is None:
        probs = torch.softmax(logits, dim=-1)
    else:
        sinks = layer.sinks.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        probs = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
    if v is None:
        return None, probs
    out = torch.matmul(probs.reshape(rows, kv_heads, -1, probs.shape[-1]), v.float())
    out = out.view(rows, kv_heads, heads // kv_heads, queries, v.shape[-1]).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, queries, heads, v.shape[-1]).to(q.dtype), probs


def mean_scores(probs: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Average probability of each key over the heads of a KV group and the real queries that see it.

    probs: [R, Hkv, G, Q, L]; sees: [R, Q, L] bool, False for padded queries. Returns [R, Hkv, L] float32.
    """
    total = (probs.sum(dim=2) * sees[:, None]).sum(dim=2)
    return total / (sees.sum(dim=1).clamp(min=1)[:, None] * probs.shape[2])


class TorchAttention(MicroStepAttention):
    """The interface on gathers and matmuls.

    Args:
        req_to_token: [rows, positions] int32, SGLang's page table (page size 1).
    """

    name = "torch"

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self.req_to_token = req_to_token
        self._drafts: DraftRows | None = None
        self._verifies: VerifyRows | None = None

    def plan(self, drafts: DraftRows | None, verifies: VerifyRows | None) -> None:
        self._drafts, self._verifies = drafts, verifies

    def draft(self, layer: LayerKV, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.attend_window(layer, q, slots, _planned(self._drafts).lengths)

    def attend_window(
        self, layer: LayerKV, q: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        mask = torch.arange(slots.shape[-1], device=q.device) < lengths[:, None, None]
        k, v = gather_heads(layer.k, slots), gather_heads(layer.v, slots)
        out, _ = attend(q[:, None], k, v, mask, layer)
        return _present(out).squeeze(1)

    def verify(
        self, layer: LayerKV, q: torch.Tensor, *, scores: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = _planned(self._verifies)
        slots, mask, sees = self._causal(rows)
        out, probs = attend(q, gather_heads(layer.k, slots), gather_heads(layer.v, slots), mask, layer)
        return _present(out), mean_scores(probs, sees) if scores else None

    def tail_scores(self, layer: LayerKV, q: torch.Tensor, rows: VerifyRows) -> torch.Tensor:
        per_row = rows.width * layer.k.shape[1] * layer.k.shape[2]
        group = max(1, GATHER_ELEMENTS // per_row)
        slots, mask, sees = self._causal(rows)
        parts = []
        for start in range(0, len(rows), group):
            part = slice(start, start + group)
            _, probs = attend(q[part], gather_heads(layer.k, slots[part]), None, mask[part], layer)
            parts.append(mean_scores(probs, sees[part]))
        return torch.cat(parts)

    def _causal(self, rows: VerifyRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slots [R, 1, L], mask [R, Q, L], and the mask without padded queries."""
        at = torch.arange(rows.width, device=self.req_to_token.device)
        query = torch.arange(rows.padded_queries, device=at.device)
        mask = at <= (rows.first[:, None] + query)[..., None]
        sees = mask & (query < rows.queries[:, None])[..., None]
        slots = self.req_to_token[rows.pools, : rows.width].long()
        # Slots behind a row's last real query may be unwritten: NaN there would poison 0 * NaN.
        slots = slots.masked_fill(at >= (rows.first + rows.queries)[:, None], 0)
        return slots[:, None], mask, sees


def _planned(rows: Rows | None) -> Rows:
    if rows is None:
        raise RuntimeError("attention was asked for rows that the micro-step did not plan.")
    return rows


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("attention output is missing.")
    return tensor
