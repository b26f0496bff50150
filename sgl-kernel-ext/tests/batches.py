"""Random ragged batches of verify rows over paged KV, with poisoned KV slots that no row may read."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class Batch:
    """Inputs of `score_keys`; see there for shapes. `packed` is the number of keys the rows need in all."""

    q: torch.Tensor
    k_cache: torch.Tensor
    page_table: torch.Tensor
    first: torch.Tensor
    queries: torch.Tensor
    prefix: torch.Tensor
    offset: torch.Tensor
    padded_queries: int
    packed: int

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5


def make_batch(
    first, queries, padded_queries, *, kv_heads=2, group=2, head_dim=64, dtype=torch.float32, device="cpu",
    seed=0, prefix=None, skip=(), duplicates=False, k_dtype=None,
) -> Batch:  # fmt: skip
    """Rows of committed lengths `first` and real `queries`; `skip` lists rows without room for scores."""
    g = torch.Generator().manual_seed(seed)
    lengths = [c + n if n else 0 for c, n in zip(first, queries, strict=True)]
    slots = 2 * sum(lengths) + 8
    k_cache = torch.full((slots, kv_heads, head_dim), float("nan"))
    order = torch.randperm(slots - 1, generator=g) + 1
    page_table = torch.full((len(first), max([*lengths, 1]) + 3), 2_000_000_000, dtype=torch.int32)
    at = 0
    for row, n in enumerate(lengths):
        page_table[row, :n] = order[at : at + n].int()
        at += n
        if duplicates and row and n and lengths[row - 1]:
            shared = min(n, lengths[row - 1], 5)
            page_table[row, :shared] = page_table[row - 1, :shared]
            page_table[row, n - 1] = page_table[row, 0]
        used = page_table[row, :n].long()
        k_cache[used] = torch.randn(n, kv_heads, head_dim, generator=g) * 2
    q = torch.randn(len(first) * padded_queries, kv_heads * group, head_dim, generator=g)
    for row, n in enumerate(queries):
        q[row * padded_queries + n : (row + 1) * padded_queries] = float("nan")
    scored = lengths if prefix is None else prefix
    offset, packed = [], 3
    for row, n in enumerate(scored):
        offset.append(-1 if row in skip else packed)
        packed += 0 if row in skip else n
    cast = {"device": device, "dtype": torch.int32}
    k_cache = k_cache.to(dtype).to(k_dtype or dtype)
    return Batch(
        q.to(device, dtype), k_cache.to(device), page_table.to(device), torch.tensor(first, **cast),
        torch.tensor(queries, **cast), torch.tensor(scored, **cast), torch.tensor(offset, device=device),
        padded_queries, packed,
    )  # fmt: skip
