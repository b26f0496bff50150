"""What the kernels compute, slow and obvious, in torch and float64. The tests hold the kernels to this."""

from __future__ import annotations

import torch

SELECT_PPM = 1_000_000


def logsumexp(q, k_cache, page_table, first, queries, *, padded_queries: int, scale: float) -> torch.Tensor:
    """LSE float32 [Hq, R*Q] of causal attention over paged KV; +inf for padding. Arguments as score_keys."""
    out = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=torch.float32, device=q.device)
    for row in range(page_table.shape[0]):
        for t in range(int(queries[row])):
            logits = _logits(
                q, k_cache, page_table, row * padded_queries + t, row, int(first[row]) + t + 1, scale
            )
            out[:, row * padded_queries + t] = torch.logsumexp(logits, -1).float()
    return out


def _logits(q, k_cache, page_table, token: int, row: int, length: int, scale: float) -> torch.Tensor:
    """scale * q.k of one query token, float64 [Hq, length]."""
    k = k_cache[page_table[row, :length].long()].double()  # [length, Hkv, D]
    grouped = q[token].double().unflatten(0, (k.shape[1], -1))  # [Hkv, G, D]
    return scale * torch.einsum("hgd,nhd->hgn", grouped, k).flatten(0, 1)


def scores(
    q, k_cache, lse, page_table, first, queries, prefix, offset, *, padded_queries: int, scale: float,
    scope: str = "layer", capacity: int, k_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Scores float64, [capacity] for scope "layer" or [Hkv, capacity]; 0 wherever no row has its keys."""
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    lines = kv_heads if scope == "kv_head" else 1
    out = torch.zeros(lines, capacity, dtype=torch.float64, device=q.device)
    for row in range(page_table.shape[0]):
        real, c, n, at = int(queries[row]), int(first[row]), int(prefix[row]), int(offset[row])
        if real <= 0 or n <= 0 or at < 0:
            continue
        total = torch.zeros(heads, n, dtype=torch.float64, device=q.device)
        for t in range(real):
            token, length = row * padded_queries + t, min(n, c + t + 1)
            logits = _logits(q, k_cache, page_table, token, row, length, scale * k_scale)
            total[:, :length] += torch.exp(logits - lse[:, token, None].double())
        seen_by = real - (torch.arange(n, device=q.device) - c).clamp(min=0)
        out[:, at : at + n] = total.unflatten(0, (lines, -1)).mean(1) / seen_by
    return out if scope == "kv_head" else out[0]


def key16(scores: torch.Tensor) -> torch.Tensor:
    """Sortable int16 key of scores in [0, 1]: the upper 16 of the 31 bits below the float32 sign."""
    return (scores.float().clamp(max=1.0).contiguous().view(torch.int32) >> 15).to(torch.int16)


def selected_count(
    prefix: int, *, ratio_ppm: int, min_tokens: int, sink: int, recent: int, width: int
) -> int:
    """Positions to select of a row with `prefix` scored keys; `width` is what the state can hold."""
    ratio = -(-prefix * ratio_ppm // SELECT_PPM)
    return min(prefix, max(min_tokens, ratio) + sink + recent, width)


def select(
    keys, offset, prefix, pools, selected, *, ratio_ppm: int, min_tokens: int, sink: int, recent: int,
    clear: bool = False,
) -> None:  # fmt: skip
    """The same as `sgl_kernel_ext.select.select`, by a stable sort on the host."""
    lines = keys.unflatten(0, (keys.shape[0], 1)) if keys.dim() == 2 else keys  # [L, H, capacity]
    for row in range(prefix.numel()):
        n, at = int(prefix[row]), int(offset[row])
        if at < 0 or n <= 0:
            continue
        count = selected_count(
            n, ratio_ppm=ratio_ppm, min_tokens=min_tokens, sink=sink, recent=recent, width=selected.shape[3]
        )
        for layer in range(lines.shape[0]):
            for head in range(lines.shape[1]):
                rank = lines[layer, head, at : at + n]
                if rank.dtype == torch.int32:
                    rank = rank.float().view(torch.int32) >> 15
                rank = rank.to(torch.int64).clone()
                rank[:sink] = 1 << 20
                rank[max(n - recent, 0) :] = 1 << 20
                chosen = torch.sort(rank, descending=True, stable=True).indices[:count]
                selected[layer, head, int(pools[row]), :count] = torch.sort(chosen).values.to(torch.int32)
                if clear:
                    lines[layer, head, at : at + n] = 0


def paged_attention(
    q, k_cache, v_cache, page_table, lengths, starts, *, most_queries: int, scale: float,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [T, Hq, D] and LSE [Hq, T], float64; zero and -inf where a token sees no key. As the kernel."""
    rows, tokens = page_table.shape[0], q.shape[0]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], tokens), float("-inf"), dtype=torch.float64, device=q.device)
    if starts is None:
        starts = torch.arange(rows + 1) * most_queries
    for row in range(rows):
        begin, end, length = int(starts[row]), int(starts[row + 1]), int(lengths[row])
        for token in range(begin, end if length else begin):
            seen = length - (end - 1 - token)
            logits = _logits(q, k_cache, page_table, token, row, seen, scale * k_scale)
            lse[:, token] = torch.logsumexp(logits, -1)
            v = v_cache[page_table[row, :seen].long()].double() * v_scale
            p = logits.softmax(-1).unflatten(0, (v.shape[1], -1))
            out[token] = torch.einsum("hgn,nhd->hgd", p, v).flatten(0, 1)
    return out, lse
