"""Paged attention in plain torch: the backend of the CPU platform for EXTEND, DECODE and MIXED batches."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

# A batch is padded to its longest request only while that at most doubles the keys to read.
_MAX_PADDING_FACTOR = 2


@dataclass(frozen=True)
class AttentionMetadata:
    """What every layer of one forward shares. The queries are the last `q_lens[i]` positions of request i."""

    q_lens: list[int]
    kv_lens: list[int]
    kv_slots: torch.Tensor  # [bs, max(kv_lens)] int64; arbitrary from column kv_lens[i] on unless `padded`
    padded: bool  # one launch for the batch: equal q_lens, and slot 0 fills the columns past kv_lens[i]
    visible: (
        torch.Tensor | None
    )  # [bs, 1, q, max(kv_lens)] bool if `padded` and some key is hidden, else None

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError(f"q_lens has {len(self.q_lens)} requests and kv_lens {len(self.kv_lens)}.")
        for q, kv in zip(self.q_lens, self.kv_lens, strict=True):
            if q > kv:
                raise ValueError(
                    f"A request has {q} queries but {kv} keys; its keys must include its queries."
                )


def build_metadata(page_table: torch.Tensor, q_lens: list[int], kv_lens: list[int]) -> AttentionMetadata:
    """Describe one causal forward.

    Args:
        page_table: [bs, >= max(kv_lens)] int, the KV slot of each position, one row a request.
        q_lens: queries of each request, the last of its positions.
        kv_lens: keys of each request, its queries included.

    Raises:
        ValueError: the lengths disagree.
    """
    bs, max_kv = len(kv_lens), max(kv_lens)
    kv_slots = page_table[:, :max_kv].long()
    uniform = min(q_lens) == max(q_lens) > 0
    if not uniform or bs * max_kv > _MAX_PADDING_FACTOR * sum(kv_lens):
        return AttentionMetadata(q_lens, kv_lens, kv_slots, padded=False, visible=None)
    lens = torch.tensor(kv_lens)
    if q_lens[0] == 1 and min(kv_lens) == max_kv:
        return AttentionMetadata(q_lens, kv_lens, kv_slots, padded=True, visible=None)
    # Columns past a request's end name stale slots, and a NaN there would survive the mask. Slot 0 is finite.
    kv_slots = kv_slots.masked_fill(torch.arange(max_kv) >= lens[:, None], 0)
    visible = _visible(lens, q_lens[0], max_kv, window=None)[:, None]
    return AttentionMetadata(q_lens, kv_lens, kv_slots, padded=True, visible=visible)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every query to the keys of its own request.

    Args:
        q: [sum(q_lens), heads, head_dim], request after request.
        k_cache: [slots, kv_heads, head_dim]; cast to q's dtype.
        v_cache: [slots, kv_heads, v_head_dim]; cast to q's dtype.
        window: keys more than `window` positions before the query are hidden; None hides none.
        causal: whether a query sees the keys after it.
        sinks: [heads] learned logits that take part in the softmax, without values; None: there are none.

    Returns:
        [sum(q_lens), heads * v_head_dim], q's dtype.
    """
    if metadata.padded and (causal or len(set(metadata.kv_lens)) == 1):
        return _attend_padded(q, k_cache, v_cache, metadata, scale, window, causal, sinks)
    outputs, start = [], 0
    for i, (q_len, kv_len) in enumerate(zip(metadata.q_lens, metadata.kv_lens, strict=True)):
        if q_len == 0:
            continue
        visible = None
        square = causal and window is None and q_len == kv_len
        if causal and not square:
            visible = _visible(torch.tensor([kv_len]), q_len, kv_len, window)
        slots = metadata.kv_slots[i : i + 1, :kv_len]
        query = q[None, start : start + q_len]
        k, v = _gather(k_cache, slots), _gather(v_cache, slots)
        outputs.append(_sdpa(query, k, v, visible, scale, is_causal=square, sinks=sinks)[0])
        start += q_len
    return torch.cat(outputs)


def _attend_padded(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    bs, q_len, max_kv = len(metadata.q_lens), metadata.q_lens[0], metadata.kv_slots.shape[1]
    visible = metadata.visible if causal else None
    if causal and window is not None and max_kv > window:
        visible = _visible(torch.tensor(metadata.kv_lens), q_len, max_kv, window)[:, None]
    query = q.view(bs, q_len, *q.shape[1:])
    k, v = _gather(k_cache, metadata.kv_slots), _gather(v_cache, metadata.kv_slots)
    out = _sdpa(query, k, v, visible, scale, sinks=sinks)
    return out.flatten(0, 1)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[slots, heads, dim] at [bs, kv] -> [bs, kv, heads, dim]. cache[slots] takes ten times as long."""
    return cache.index_select(0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:])


def _visible(kv_lens: torch.Tensor, q_len: int, max_kv: int, window: int | None) -> torch.Tensor:
    """[bs, q_len, max_kv] bool: the keys that the last `q_len` positions of each request see."""
    query_pos = (kv_lens[:, None] - q_len + torch.arange(q_len))[:, :, None]
    key_pos = torch.arange(max_kv)
    visible = key_pos <= query_pos
    if window is not None:
        visible &= key_pos >= query_pos - window
    return visible


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [bs, q_len, heads, dim], k and v [bs, kv_len, kv_heads, dim] -> [bs, q_len, heads * v_dim]."""
    if sinks is not None:
        k, v, visible = _with_sinks(q, k, v, visible, is_causal, sinks)
        is_causal = False
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).to(q.dtype),
        v.transpose(1, 2).to(q.dtype),
        attn_mask=visible,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).flatten(2)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    is_causal: bool,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v with one more key, of zeros, and the mask [bs, heads, q_len, kv_len + 1] as biases: the sinks'
    logits are the new key's."""
    bs, q_len, heads, _ = q.shape
    if visible is None:
        visible = torch.ones(bs, 1, q_len, k.shape[1], dtype=torch.bool)
        visible = visible.tril() if is_causal else visible
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    bias = bias.view(-1, 1, q_len, k.shape[1]).expand(bs, heads, -1, -1)
    own = sinks.to(q.dtype)[:, None, None].expand(bs, heads, q_len, 1)
    k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k, v))
    return k, v, torch.cat([bias, own], dim=-1)


class CpuTorchAttnBackend(AttentionBackend):
    """SGLang's interface over `paged_attention`. MHA and GQA with one KV pool.

    It serves no speculative forward mode: a speculative worker brings its own backend.

    Raises:
        ValueError: at construction, for a model whose attention it cannot serve.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if not isinstance(self.token_to_kv_pool, MHATokenToKVPool):
            raise ValueError(
                f"The CPU platform got a {type(self.token_to_kv_pool).__name__}; it serves MHA and GQA "
                f"models with an MHATokenToKVPool. MLA and Mamba models need a GPU."
            )
        self.forward_metadata: AttentionMetadata | None = None  # set by init_forward_metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the metadata of one forward from a ForwardBatch.

        Raises:
            NotImplementedError: the forward mode is not IDLE, DECODE, EXTEND, MIXED or SPLIT_PREFILL.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        kv_lens = forward_batch.seq_lens.tolist()
        if mode.is_decode():
            q_lens = [1] * len(kv_lens)
        elif mode.is_extend_or_draft_extend_or_mixed():
            q_lens = forward_batch.extend_seq_lens.tolist()
        else:
            raise NotImplementedError(
                f"The CPU platform's attention got forward mode {mode.name}; it serves IDLE, DECODE, EXTEND, "
                f"MIXED and SPLIT_PREFILL. A speculative worker must bring its own backend."
            )
        page_table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        self.forward_metadata = build_metadata(page_table, q_lens, kv_lens)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write k and v to the pool, then attend.

        Args:
            q: [tokens, heads * head_dim] or [tokens, heads, head_dim].
            k: [tokens, kv_heads, head_dim] or flat; None where the layer reuses another layer's KV.
            v: as k, with v_head_dim.

        Returns:
            [tokens, heads * v_head_dim].
        """
        if self.forward_metadata is None:
            raise RuntimeError("Attention ran before init_forward_metadata; call it once for every forward.")
        if layer.logit_cap:
            raise NotImplementedError(
                f"The layer caps its attention logits at {layer.logit_cap}, which the CPU platform cannot "
                f"do; use a GPU for this model."
            )
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        window = layer.sliding_window_size
        return paged_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.forward_metadata,
            scale=layer.scaling,
            window=window if window is not None and window > -1 else None,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            sinks=kwargs.get("sinks"),
        )

    forward_decode = forward_extend  # the metadata alone tells them apart

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length given to padding rows."""
        return 1

    def support_triton(self) -> bool:
        """Return False: SGLang then takes its torch paths for the page table and the allocator."""
        return False
