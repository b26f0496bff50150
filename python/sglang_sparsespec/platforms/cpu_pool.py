"""The KV pool of the CPU platform."""

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool with KV moved by torch indexing.

    SGLang's own launches a Triton copy to warm it up as soon as any speculative algorithm is on.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
