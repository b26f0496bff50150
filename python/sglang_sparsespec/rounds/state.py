"""What the worker remembers of every request between micro-steps, on the device, indexed by KV pool row."""

from __future__ import annotations

import torch


class RequestState:
    """Device state of all requests. Row 0 is the pool's padding row and stays harmless.

    Args:
        rows: rows of the request pool, padding row included.
        stride: k.
        support: most tokens a sampled draft is drawn from (columns of `support_ids`).
        layers, heads: selections kept: groups of attention layers, and index heads of each (1: shared).
        max_selected: most positions one selection can hold.
    """

    def __init__(
        self,
        *,
        rows: int,
        stride: int,
        support: int,
        layers: int,
        heads: int,
        max_selected: int,
        device: torch.device | str,
    ) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.stride = stride
        self.tokens = ints(rows, stride + 1)  # [rows, k+1] last committed token, then the drafts
        self.support_ids = ints(rows, stride, support)  # [rows, k, M] what each draft was drawn from ...
        self.support_probs = torch.zeros(
            rows, stride, support, device=device
        )  # ... and with which probability
        # [layers, heads, rows, max_selected] logical positions, ascending; beyond `selected_len` undefined.
        self.selected = ints(layers, heads, rows, max_selected, dtype=torch.int32)
        self.committed = ints(rows)  # [rows] tokens with KV of the full model
        self.selected_len = ints(rows)  # [rows]
        self.selected_base = ints(
            rows
        )  # [rows] prefix the selection was made from; all later tokens are kept

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def begin(self, pools: torch.Tensor, tokens: torch.Tensor) -> None:
        """Start (or restart) requests after a prefill. pools: [n] int64; tokens: [n], sampled, without
        KV yet."""
        self.tokens[pools, 0] = tokens.to(torch.int64)

    def begin_window(self, pools: torch.Tensor, lengths: torch.Tensor) -> None:
        """Let new requests draft from their latest tokens until a selection is made.

        Pool rows are reused: nothing of the row's last request may survive. lengths: [n] int64, committed.
        """
        self.committed[pools] = lengths
        self.selected_len.index_fill_(0, pools, 0)  # a number assigned to rows would wait for the device
        self.selected_base[pools] = (lengths - self.selected.shape[-1]).clamp(min=0)

    def zero(self) -> None:
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
