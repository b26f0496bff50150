"""Tensors that the kernels of a round share; no Triton here, so that a machine without it can import them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEADER = 4  # int32 words before the rows: micro-step counter, greedy flag, two unused
FIELDS = 3  # a row: pool row of the request (0: empty slot), drafts made so far, row in the batch


@dataclass(frozen=True)
class MicroStepBuffers:
    """Static tensors of one graph's micro-step, `nd` draft slots and `nv` verify slots of Q tokens each.

    T = nd + nv * Q tokens, draft slots first. Everything is int32 unless said otherwise.
    """

    nd: int
    nv: int
    queries: int  # Q = k + 1
    header: torch.Tensor  # [HEADER]
    table: torch.Tensor  # [k+1, 2, slots, FIELDS]: [micro-step, draft or verify, slot]
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64; 0 (the dummy slot) where nothing real is written
    draft_pool: torch.Tensor  # [nd]
    draft_len: torch.Tensor  # [nd] keys the row attends to, its own included; 0: empty slot
    draft_at: torch.Tensor  # [nd] drafts that the request has made before this one
    draft_first: torch.Tensor  # [nd] keys before the row's own, as `verify_attention` counts them
    draft_queries: torch.Tensor  # [nd] 1; 0 for an empty slot
    verify_pool: torch.Tensor  # [nv]
    first: torch.Tensor  # [nv] committed length
    verify_queries: torch.Tensor  # [nv] real queries; 0: empty slot
    seqlens: torch.Tensor  # [nv] first + Q, 0 for an empty slot: padded queries stand behind the real ones
    offset: torch.Tensor  # [nv] int64: start of the row's scores; -1: they do not fit, nothing is scored


@dataclass(frozen=True)
class RequestTensors:
    """Device state of all requests, by pool row."""

    committed: torch.Tensor  # [rows] int64
    tokens: torch.Tensor  # [rows, k+1] int64
    selected: torch.Tensor  # [groups, H, rows, cap] int32
    selected_len: torch.Tensor  # [rows] int64
    selected_base: torch.Tensor  # [rows] int64
    req_to_token: torch.Tensor  # [rows, W] int32
