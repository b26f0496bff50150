"""Which of a model's attention layers see all tokens, and which a sliding window.

Only the former are worth a selection. In the latter, drafts and verifications alike attend to the window:
each token of a micro-step is a row of its own, over the page table of its window. Learned sinks (gpt-oss) add
to a softmax's denominator and to nothing else, so they are applied to what attention without them returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionLayers:
    """Layer ids of a model's attention layers.

    Attributes:
        full: those that see all tokens, in order; a selection, or a share in one, each.
        windows: of all others, how many keys before its own one a query sees.
    """

    full: tuple[int, ...]
    windows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Iterable[Any]) -> AttentionLayers:
        """Of SGLang's `RadixAttention` layers."""
        full, windows = [], {}
        for layer in layers:
            window = layer.sliding_window_size
            if window is None or window < 0:
                full.append(layer.layer_id)
            else:
                windows[layer.layer_id] = window
        return cls(tuple(sorted(full)), windows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The windows that differ."""
        return tuple(sorted(set(self.windows.values())))

    def index(self, layer_id: int) -> int:
        """Position among the layers that see all tokens; -1 for the others."""
        return -1 if layer_id in self.windows else self.full.index(layer_id)


@dataclass(frozen=True)
class WindowRows:
    """The windows of a micro-step's tokens, one row a token."""

    slots: torch.Tensor  # [T, 1, window + 1]; beyond a row's length its own slot
    lengths: torch.Tensor  # [T]

    @classmethod
    def of(
        cls,
        req_to_token: torch.Tensor,
        pools: torch.Tensor,
        positions: torch.Tensor,
        window: int,
        *,
        dtype: torch.dtype,
    ) -> WindowRows:
        """Of tokens at `positions` [T] of the requests in rows `pools` [T] of the page table.

        dtype: of slots and lengths, as the attention takes them.
        """
        lengths = (positions + 1).clamp(max=window + 1)
        columns = torch.arange(window + 1, device=positions.device)
        at = torch.minimum((positions + 1 - lengths)[:, None] + columns, positions[:, None])
        # Padded tokens of a request at its context limit stand behind the table's last column.
        at = at.clamp(max=req_to_token.shape[1] - 1)
        return cls(req_to_token[pools[:, None], at][:, None].to(dtype), lengths.to(dtype))


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with learned sinks, from attention without them.

    Args:
        out: [T, heads, D]. lse: [T, heads] float32, natural log. sinks: [heads], None: there are none.
    """
    if sinks is None:
        return out, lse
    sinks = sinks.float()
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)
