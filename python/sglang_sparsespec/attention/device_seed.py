"""First selections on the CUDA-graph path: the last queries of a prefill are attended once more for their
LSE, then scored and selected by the same kernels as a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sgl_kernel_ext.buffers import SCORE_ALIGN

from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.layers import add_sinks
from sglang_sparsespec.attention.paged import ScoredRows
from sglang_sparsespec.rounds.batch import to_device
from sglang_sparsespec.rounds.device import DeviceRounds


@dataclass(frozen=True)
class DeviceSeed:
    """The tails of one prefill's rows."""

    rows: ScoredRows
    pages: torch.Tensor  # [n, W] int32
    lengths: torch.Tensor  # [n] int32
    starts: torch.Tensor  # [n+1] int32, tails together without padding
    tokens: torch.Tensor  # [sum of tails] int64: token of the prefill
    padded: torch.Tensor  # [n * queries] int64: tail token of each padded query

    def score(self, rounds: DeviceRounds, layer: LayerKV, q: torch.Tensor) -> None:
        """Score one layer from the prefill's queries, [T, heads, D]; their KV is in the pool already."""
        if not rounds.scores_needed or not layer.starts_group(rounds.config.score_layer_stride):
            return
        tails = q[self.tokens]
        _, lse = rounds.attention.verify(
            layer, tails, self.pages, self.lengths, self.starts, self.rows.queries
        )
        lse = add_sinks(tails, lse.t(), layer.sinks)[1].t()
        rounds.score(layer, tails[self.padded], lse[:, self.padded].contiguous(), self.pages, self.rows)


def plan_device_seed(rounds: DeviceRounds, forward_batch: Any, most_queries: int) -> DeviceSeed | None:
    """Lay out the tails of a prefill, and start its requests with a window of their latest tokens.

    Args:
        forward_batch: SGLang's ForwardBatch of an extend; its lengths are known to the host.
        most_queries: most queries of a row's tail.
    """
    device = rounds.header.device
    lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
    totals = [int(n) for n in forward_batch.seq_lens_cpu]
    pools = forward_batch.req_pool_indices.long()
    rounds.state.begin_window(pools, to_device(totals, device))
    kept = [row for row, n in enumerate(lengths) if n > 0]
    if not kept:
        return None
    tails = [min(lengths[row], most_queries) for row in kept]
    width = max(tails)
    ends = [sum(lengths[: row + 1]) for row in kept]
    starts = [sum(tails[:row]) for row in range(len(tails) + 1)]
    offsets, used = [], 0
    for row in kept:
        offsets.append(used if used + totals[row] <= rounds.capacity else -1)
        used += -(-totals[row] // SCORE_ALIGN) * SCORE_ALIGN

    def ints(values: list[int]) -> torch.Tensor:
        return to_device(values, device).to(torch.int32)

    chosen = pools[to_device(kept, device)]
    prefix = ints([totals[row] for row in kept])
    scored = ScoredRows(
        pools=chosen.to(torch.int32),
        first=ints([totals[row] - tail for row, tail in zip(kept, tails, strict=True)]),
        real=ints(tails),
        prefix=prefix,
        offset=to_device(offsets, device),
        queries=width,
    )
    longest = max(totals[row] for row in kept)
    return DeviceSeed(
        rows=scored,
        pages=rounds.requests.req_to_token[chosen, :longest].contiguous(),
        lengths=prefix,
        starts=ints(starts),
        tokens=to_device(
            [end - tail + t for end, tail in zip(ends, tails, strict=True) for t in range(tail)], device
        ),
        padded=to_device(
            [
                start + min(t, tail - 1)
                for start, tail in zip(starts, tails, strict=False)
                for t in range(width)
            ],
            device,
        ),
    )
