"""SGLang's host tier of the KV cache (HiCache) on the CPU platform: copies by torch indexing, no pinned
memory.

"Device" and host pool both lie in the same memory there, so the tier saves nothing; it makes all that depends
on it testable.
"""

from collections.abc import Callable
from typing import Any

import torch

LAYOUTS = ("layer_first", "page_first")  # those with a view of each layer, [tokens, heads, dims]


def host_pool_replacements() -> dict[str, Callable[..., Any]]:
    """Return {dotted name of the in-tree function: its torch version}, for HookRegistry REPLACE hooks."""
    pool = "sglang.srt.mem_cache.pool_host"
    return {
        f"{pool}.common._cuda_host_register": register_nothing,
        f"{pool}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer": back_up,
        f"{pool}.mha.MHATokenToKVPoolHost.load_to_device_per_layer": load_layer,
    }


def register_nothing(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Leave the buffer as it is: pinning serves transfers of a GPU."""


def back_up(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Copy KV of slots `device_indices` [n] to host slots `host_indices` [n], in all layers.

    Raises:
        ValueError: the host pool has a layout without views of layers.
    """
    _check_layout(self.layout)
    for layer in range(self.layer_num):
        self.k_data_refs[layer][host_indices] = self.device_k_buffers[layer][device_indices]
        self.v_data_refs[layer][host_indices] = self.device_v_buffers[layer][device_indices]


def load_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy KV of host slots `host_indices` [n] to slots `device_indices` [n], in one layer.

    Raises:
        ValueError: the host pool has a layout without views of layers.
    """
    _check_layout(self.layout)
    self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
    self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(
            f"--hicache-mem-layout={layout} is not available on the CPU platform; allowed are "
            f"{', '.join(LAYOUTS)}. Drop --hicache-mem-layout, or run on a GPU."
        )
