"""Where the memory of a server goes, told once at start-up and by `/server_info`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

LITTLE = 1 << 30  # bytes that should stay free on a GPU
WAYS_OUT = (
    "lower --mem-fraction-static by 0.05, then --max-running-requests or --cuda-graph-max-bs-decode, then "
    "--context-length; draft_weights 'model' needs no copies of weights"
)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank. `free` and `total` are the device's; None on a CPU."""

    weights: int
    draft_weights: int
    kv_pool: int
    kv_tokens: int
    page_tables: int
    selection: int  # state of requests, scratch for scores and page tables of drafts
    graphs: int
    host_tier: int
    host_tokens: int
    free: int | None = None
    total: int | None = None

    @property
    def other(self) -> int | None:
        """Bytes in use that are none of these: CUDA itself, workspaces, other processes on the device."""
        if self.free is None or self.total is None:
            return None
        known = (
            self.weights, self.draft_weights, self.kv_pool, self.page_tables, self.selection, self.graphs
        )  # fmt: skip
        return self.total - self.free - sum(known)

    def asdict(self) -> dict[str, Any]:
        """What `/server_info` shows under `memory`: bytes, and tokens where the name says so."""
        return {name: getattr(self, name) for name in (*self.__dataclass_fields__, "other")}

    def __str__(self) -> str:
        parts = [
            f"weights {gib(self.weights)}",
            f"copies for drafts {gib(self.draft_weights)}",
            f"KV pool {gib(self.kv_pool)} ({self.kv_tokens:,} tokens)",
            f"page tables {gib(self.page_tables)}",
            f"selection state and scratch {gib(self.selection)}",
            f"CUDA graphs {gib(self.graphs)}",
        ]
        if self.free is not None and self.total is not None and self.other is not None:
            parts += [f"other {gib(self.other)}", f"free {gib(self.free)} of {gib(self.total)}"]
        parts.append(f"on the host: {gib(self.host_tier)} of KV ({self.host_tokens:,} tokens)")
        text = "SPARSESPEC memory in GiB: " + ", ".join(parts) + "."
        if self.free is not None and self.free < LITTLE:
            text += f" Little is free. If the server runs out of memory: {WAYS_OUT}."
        return text


def gib(size: int) -> str:
    """Bytes in GiB, as text."""
    return f"{size / 2**30:.2f}"


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, those that share memory counted once."""
    seen = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def device_memory(device: torch.device | str) -> tuple[int, int] | tuple[None, None]:
    """Free and total bytes of a GPU; nothing of a CPU."""
    return torch.cuda.mem_get_info(device) if torch.device(device).type == "cuda" else (None, None)
