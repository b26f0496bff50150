"""Small host tables on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def upload(
    values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of `values` on `device`. On a GPU it is copied behind what the stream already holds."""
    host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        # The pinned block goes back to torch's host allocator, which waits for this copy.
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
