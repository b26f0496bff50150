"""Tensors that the kernels of a round share; no Triton here, so that a machine without it can import them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEADER = 4  # int32 words before the rows: micro-step counter, greedy flag, two unused
SCORE_ALIGN = 16  # a row's scores start at a multiple of this
LOOK_UP_TAIL = 8  # latest tokens that a lookup compares at most
FIELDS = 3  # a row: pool row of the request (0: empty slot), drafts made so far, row in the batch


@dataclass(frozen=True)
class MicroStepBuffers:
    """Static tensors of one graph's micro-step: `nd` draft slots, `nv` verify slots of `queries` tokens each.

    T = nd + nv * queries tokens, draft slots first. Everything is int32 unless said otherwise.
    """

    nd: int
    nv: int
    queries: int  # 1 .. k + 1: a round of fewer drafts verifies in narrower slots
    header: torch.Tensor  # [HEADER]
    table: torch.Tensor  # [k+1, 2, slots, FIELDS]: [micro-step, draft or verify, slot]
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64; 0 (the dummy slot) where nothing real is written
    draft_pool: torch.Tensor  # [nd]
    draft_len: torch.Tensor  # [nd] keys the row attends to, its own included; 0: empty slot
    draft_at: torch.Tensor  # [nd] drafts that the request has made before this one
    verify_pool: torch.Tensor  # [nv]
    first: torch.Tensor  # [nv] committed length
    verify_queries: torch.Tensor  # [nv] real queries; 0: empty slot
    seqlens: (
        torch.Tensor
    )  # [nv] first + queries, 0 for an empty slot: padded queries stand behind the real ones
    offset: torch.Tensor  # [nv] int64: start of the row's scores; -1: they do not fit, nothing is scored


class RoundBuffers:
    """Static memory of all micro-steps of a round; a micro-step's tensors are views of it.

    Args:
        slots: most draft slots, and most verify slots, of a micro-step.
        queries: most tokens of a verify slot, k + 1.
    """

    def __init__(self, slots: int, queries: int, device: torch.device | str) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.queries = queries
        self.flat_table = ints(HEADER + queries * 2 * slots * FIELDS)  # header and table, to upload at once
        self.header = self.flat_table[:HEADER]
        self.table = self.flat_table[HEADER:].view(queries, 2, slots, FIELDS)
        self.tokens = ints(3, slots * (1 + queries), dtype=torch.int64)  # ids, positions, KV slots
        self.drafts = ints(3, slots)  # pool, length, drafts made before
        self.verifies = ints(4, slots)  # pool, first, queries, seqlens
        self.offsets = ints(slots, dtype=torch.int64)

    def step(self, nd: int, nv: int, queries: int | None = None) -> MicroStepBuffers:
        """Views for `nd` draft slots and `nv` verify slots of `queries` tokens (default: the most)."""
        queries = self.queries if queries is None else queries
        ids, positions, loc = self.tokens[:, : nd + nv * queries]
        draft_pool, draft_len, draft_at = self.drafts[:, :nd]
        verify_pool, first, verify_queries, seqlens = self.verifies[:, :nv]
        return MicroStepBuffers(
            nd=nd,
            nv=nv,
            queries=queries,
            header=self.header,
            table=self.table,
            input_ids=ids,
            positions=positions,
            out_cache_loc=loc,
            draft_pool=draft_pool,
            draft_len=draft_len,
            draft_at=draft_at,
            verify_pool=verify_pool,
            first=first,
            verify_queries=verify_queries,
            seqlens=seqlens,
            offset=self.offsets[:nv],
        )


@dataclass(frozen=True)
class RequestTensors:
    """Device state of all requests, by pool row."""

    committed: torch.Tensor  # [rows] int64
    tokens: torch.Tensor  # [rows, k+1] int64
    selected: torch.Tensor  # [groups, H, rows, cap] int32
    selected_len: torch.Tensor  # [rows] int64
    selected_base: torch.Tensor  # [rows] int64
    req_to_token: torch.Tensor  # [rows, W] int32
