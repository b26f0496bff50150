"""What SPARSESPEC does not serve yet, refused by name: server flags at start-up, requests with HTTP 400.

One list each, so that the support matrix of the documentation can be checked against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WAYS_OUT = "Drop that, or start the server without --speculative-algorithm SPARSESPEC."


@dataclass(frozen=True)
class Refusal:
    """Something unsupported: its name as users write it, and how to see that it was asked for."""

    name: str
    asked: Callable[[Any], bool]
    reason: str


def _set(field: str) -> Callable[[Any], bool]:
    return lambda given: bool(getattr(given, field, None))


def _above(field: str, limit: int) -> Callable[[Any], bool]:
    return lambda given: (getattr(given, field, None) or limit) > limit


SERVER_REFUSALS: tuple[Refusal, ...] = (
    Refusal("--pp-size > 1", _above("pp_size", 1), "drafts and verification run on one pipeline stage"),
    Refusal(
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode not in (None, "null"),
        "selections are not transferred between prefill and decode servers",
    ),
    Refusal("--enable-dp-attention", _set("enable_dp_attention"), "micro-steps are not padded across ranks"),
    Refusal("--dcp-size > 1", _above("dcp_size", 1), "KV of a request must be on one rank"),
    Refusal("--attn-cp-size > 1", _above("attn_cp_size", 1), "KV of a request must be on one rank"),
    Refusal("--enable-mixed-chunk", _set("enable_mixed_chunk"), "prefills run between rounds"),
    Refusal("--enable-lora", _set("enable_lora"), "drafts do not carry adapters yet"),
    Refusal("--lora-paths", _set("lora_paths"), "drafts do not carry adapters yet"),
    Refusal("--use-ray", _set("use_ray"), "Ray's scheduler actors do not load SGLang plugins"),
    Refusal(
        "--tokenizer-worker-num > 1",
        _above("tokenizer_worker_num", 1),
        "SGLang's tokenizer workers do not load plugins",
    ),
    Refusal("--enable-two-batch-overlap", _set("enable_two_batch_overlap"), "rounds are not split"),
    Refusal("--enable-pdmux", _set("enable_pdmux"), "rounds are not split"),
    Refusal("--enable-unified-memory", _set("enable_unified_memory"), "KV slots must be stable in a round"),
    Refusal("--dllm-algorithm", _set("dllm_algorithm"), "diffusion models do not decode left to right"),
    Refusal(
        "--enable-return-hidden-states",
        _set("enable_return_hidden_states"),
        "hidden states of accepted tokens are not collected",
    ),
    Refusal("--page-size > 1", _above("page_size", 1), "selection works on single tokens"),
    Refusal("--speculative-eagle-topk > 1", _above("speculative_eagle_topk", 1), "drafts are a chain"),
    Refusal(
        "--speculative-draft-model-path",
        _set("speculative_draft_model_path"),
        "the model drafts for itself; there is no draft model",
    ),
    Refusal(
        "--kv-cache-dtype",
        lambda args: (
            args.kv_cache_dtype not in (None, "auto", "bfloat16", "bf16")
            and not (args.kv_cache_dtype == "fp8_e4m3" and args.device == "cuda")
        ),
        "besides the model's own type only fp8_e4m3 can be scored, and only on a GPU",
    ),
    Refusal(
        "--enable-deterministic-inference",
        _set("enable_deterministic_inference"),
        "draft and verify rows differ in shape",
    ),
    Refusal(
        "--kv-canary",
        lambda args: args.kv_canary != "none" and args.device != "cuda",
        "SGLang's canary watches KV caches of GPUs only",
    ),
    Refusal("--is-embedding", _set("is_embedding"), "there is nothing to draft"),
    Refusal("--sampling-backend ascend", lambda args: args.sampling_backend == "ascend", "not implemented"),
)

# With `offload` in the configuration.
OFFLOAD_REFUSALS: tuple[Refusal, ...] = (
    Refusal("--disable-radix-cache", _set("disable_radix_cache"), "KV leaves for the host by the radix tree"),
    Refusal("--radix-cache-backend", _set("radix_cache_backend"), "only SGLang's own tree has a host tier"),
    Refusal("--enable-lmcache", _set("enable_lmcache"), "only SGLang's own tree has a host tier"),
    Refusal(
        "--hicache-write-policy write_back",
        lambda args: args.hicache_write_policy == "write_back",
        "it copies when a request leaves, and the others would wait",
    ),
    Refusal(
        "--hicache-host-memory-mode buffer_only",
        lambda args: args.hicache_host_memory_mode == "buffer_only",
        "the host keeps nothing then",
    ),
)

MLA = "uses multi-head latent attention (MLA), whose KV is shared by all heads"


def server_refusals(args: Any) -> list[str]:
    """A sentence for every unsupported server flag in `args`."""
    return [f"{r.name}: {r.reason}" for r in SERVER_REFUSALS if r.asked(args)]


def offload_refusals(args: Any) -> list[str]:
    """A sentence for every server flag in `args` that `offload` cannot be used with."""
    return [
        f"{r.name} beside offload: {r.reason} (offload 'off' goes without)"
        for r in OFFLOAD_REFUSALS
        if r.asked(args)
    ]


def model_refusal(model_config: Any) -> str | None:
    """Why the model of a `ModelConfig` cannot be served, or None."""
    name = (getattr(model_config.hf_config, "architectures", None) or ["?"])[0]
    text = model_config.hf_text_config
    if model_config.attention_arch.name != "MHA":
        kind = (
            MLA if model_config.attention_arch.name == "MLA" else "has no softmax attention over a KV cache"
        )
        return f"{name} {kind}"
    if model_config.attention_chunk_size:
        return f"{name} attends in chunks of {model_config.attention_chunk_size} tokens"
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"{name} has layers of type {', '.join(sorted(kinds))}"
    if model_config.linear_attn_registry_result is not None or hasattr(text, "mamba_chunk_size"):
        return f"{name} has recurrent layers, whose state would have to be rolled back"
    if model_config.is_multimodal:
        return f"{name} is multimodal"
    if not model_config.is_generation:
        return f"{name} does not generate text"
    if getattr(text, "attn_logit_softcapping", None):
        return f"{name} caps its attention logits (attn_logit_softcapping)"
    return None


def unsupported_layer(layer: Any) -> str | None:
    """Why a `RadixAttention` layer cannot be served: the last check, when the model is there."""
    if layer.logit_cap:
        return f"caps its attention logits at {layer.logit_cap}"
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        return "is not causal self-attention"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"has keys of {layer.qk_head_dim} and values of {layer.v_head_dim} dimensions"
    return None


def _sampling(field: str, neutral: Any) -> Callable[[Any], bool]:
    return lambda req: getattr(req.sampling_params, field, neutral) not in (neutral, None)


REQUEST_REFUSALS: tuple[Refusal, ...] = (
    Refusal("beam_width > 1", lambda req: (req.sampling_params.beam_width or 1) > 1, "beam search"),
    Refusal("watermark", _sampling("watermark", None), "watermarks"),
    Refusal("return_hidden_states", _set("return_hidden_states"), "hidden states"),
    Refusal("return_sampling_mask", _set("return_sampling_mask"), "sampling masks"),
    Refusal("return_routed_experts", _set("return_routed_experts"), "routed experts"),
    Refusal("lora_path", _set("lora_id"), "LoRA adapters"),
    Refusal("input_embeds", lambda req: req.input_embeds is not None, "input embeddings"),
    Refusal("image_data", lambda req: req.multimodal_inputs is not None, "multimodal input"),
    Refusal("session_params", lambda req: req.session is not None, "sessions"),
)

MOST_TOP_K = 2**31 - 1


def request_fault(req: Any) -> str | None:
    """What is wrong with a request (`Req`) that would end SGLang's scheduler, with or without us, or None."""
    ids, params = req.origin_input_ids, req.sampling_params
    if len(ids) == 0:
        return "The prompt is empty: text or input_ids must give at least one token."
    outside = next((i for i in (min(ids), max(ids)) if not 0 <= i < req.vocab_size), None)
    if outside is not None:
        return f"input_ids holds {outside}; allowed are the model's token ids, 0 to {req.vocab_size - 1}."
    if params.top_k > MOST_TOP_K:
        return f"top_k is {params.top_k}; allowed are 1 to {MOST_TOP_K}, and -1 for all tokens."
    if params.min_new_tokens > 0:
        stops = sorted(params.stop_token_ids or ())
        unknown = [i for i in stops if not 0 <= i < req.vocab_size]
        if unknown:
            return (
                f"stop_token_ids holds {unknown[0]}; with min_new_tokens, allowed are the model's token ids, "
                f"0 to {req.vocab_size - 1}."
            )
    return None


def request_refusal(req: Any) -> str | None:
    """The error text for a request (`Req`) that asks for something unsupported, or None."""
    found = [r for r in REQUEST_REFUSALS if r.asked(req)]
    if not found:
        return None
    names = ", ".join(r.name for r in found)
    what = ", ".join(dict.fromkeys(r.reason for r in found))
    return f"SPARSESPEC does not support {what} yet: the request gives {names}. {WAYS_OUT}"
