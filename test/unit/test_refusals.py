"""What is not supported is refused by name: every entry of the lists, and nothing that is supported."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang_sparsespec
from sglang_sparsespec.refusals import (
    OFFLOAD_REFUSALS,
    REQUEST_REFUSALS,
    SERVER_REFUSALS,
    model_refusal,
    offload_refusals,
    request_fault,
    request_refusal,
    server_refusals,
    unsupported_layer,
)

MODEL = Path(sglang_sparsespec.__file__).parent / "assets" / "reasoner-5m"

# --- server flags ---

SERVER = {
    "--pp-size > 1": {"pp_size": 2},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--enable-dp-attention": {"enable_dp_attention": True},
    "--dcp-size > 1": {"dcp_size": 2},
    "--attn-cp-size > 1": {"attn_cp_size": 4},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--enable-lora": {"enable_lora": True},
    "--lora-paths": {"lora_paths": ["a=b"]},
    "--use-ray": {"use_ray": True},
    "--tokenizer-worker-num > 1": {"tokenizer_worker_num": 2},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--enable-return-hidden-states": {"enable_return_hidden_states": True},
    "--page-size > 1": {"page_size": 64},
    "--speculative-eagle-topk > 1": {"speculative_eagle_topk": 4},
    "--speculative-draft-model-path": {"speculative_draft_model_path": "some/model"},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "--enable-deterministic-inference": {"enable_deterministic_inference": True},
    "--kv-canary": {"kv_canary": "raise"},
    "--is-embedding": {"is_embedding": True},
    "--sampling-backend ascend": {"sampling_backend": "ascend"},
}


def server_args(**given):
    """SGLang's own record, which knows its fields and defaults."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="some/model", **given)


def test_every_server_refusal_has_a_case():
    assert [refusal.name for refusal in SERVER_REFUSALS] == list(SERVER)


@pytest.mark.parametrize("name", SERVER)
def test_a_server_flag_is_refused_by_its_name(name):
    refusal = next(refusal for refusal in SERVER_REFUSALS if refusal.name == name)
    assert server_refusals(server_args(**SERVER[name])) == [f"{name}: {refusal.reason}"]


OFFLOAD = {
    "--disable-radix-cache": {"disable_radix_cache": True},
    "--radix-cache-backend": {"radix_cache_backend": "mine"},
    "--enable-lmcache": {"enable_lmcache": True},
    "--hicache-write-policy write_back": {"hicache_write_policy": "write_back"},
    "--hicache-host-memory-mode buffer_only": {"hicache_host_memory_mode": "buffer_only"},
}


def test_offload_refuses_flags_that_leave_it_no_host_tier():
    assert [refusal.name for refusal in OFFLOAD_REFUSALS] == list(OFFLOAD)
    for refusal, given in zip(OFFLOAD_REFUSALS, OFFLOAD.values(), strict=True):
        wanted = f"{refusal.name} beside offload: {refusal.reason} (offload 'off' goes without)"
        assert offload_refusals(server_args(**given)) == [wanted]
    assert offload_refusals(server_args()) == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"page_size": 1, "pp_size": 1, "speculative_eagle_topk": 1, "tp_size": 8},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "bf16"},
        {"kv_cache_dtype": "fp8_e4m3", "device": "cuda"},
        {"kv_canary": "raise", "device": "cuda"},
    ],
)
def test_supported_server_flags_are_not_refused(given):
    assert server_refusals(server_args(**given)) == []


def test_all_unsupported_flags_are_told_at_once():
    told = server_refusals(server_args(pp_size=2, enable_lora=True))
    assert [text.split(":")[0] for text in told] == ["--pp-size > 1", "--enable-lora"]


# --- requests ---

REQUEST = {
    "beam_width > 1": {"beam_width": 2},
    "watermark": {"watermark": {"key": "ab12"}},
    "return_hidden_states": {"return_hidden_states": True},
    "return_sampling_mask": {"return_sampling_mask": True},
    "return_routed_experts": {"return_routed_experts": True},
    "lora_path": {"lora_id": "a"},
    "input_embeds": {"input_embeds": [[0.0]]},
    "image_data": {"multimodal_inputs": object()},
    "session_params": {"session": object()},
}
REQ_FIELDS = {
    "return_logprob": False,
    "custom_logit_processor": None,
    "return_hidden_states": False,
    "return_sampling_mask": False,
    "return_routed_experts": False,
    "lora_id": None,
    "input_embeds": None,
    "multimodal_inputs": None,
    "session": None,
    "origin_input_ids": [5],
    "vocab_size": 896,
}


def request(**given):
    """A `Req` with SGLang's own sampling parameters."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = {name: value for name, value in given.items() if name in REQ_FIELDS}
    sampling = {name: value for name, value in given.items() if name not in REQ_FIELDS}
    return SimpleNamespace(sampling_params=SamplingParams(**sampling), **(REQ_FIELDS | own))


def test_every_request_refusal_has_a_case():
    assert [refusal.name for refusal in REQUEST_REFUSALS] == list(REQUEST)


@pytest.mark.parametrize("name", REQUEST)
def test_a_request_is_refused_with_the_name_of_its_field(name):
    told = request_refusal(request(**REQUEST[name]))
    reason = next(refusal.reason for refusal in REQUEST_REFUSALS if refusal.name == name)
    assert f"the request gives {name}. " in told
    assert f"does not support {reason} yet" in told
    assert "Drop that, or start the server without --speculative-algorithm SPARSESPEC." in told


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "stop": ["x"], "n": 2},
        {"return_logprob": True, "max_new_tokens": 2},
        {"frequency_penalty": 0.5, "presence_penalty": 1.0, "repetition_penalty": 1.1},
        {"min_new_tokens": 5, "logit_bias": {"3": 1.0}},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"ignore_eos": True, "stop_token_ids": [3], "skip_special_tokens": False},
    ],
)
def test_supported_requests_are_not_refused(given):
    assert request_refusal(request(**given)) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"origin_input_ids": []}, "The prompt is empty"),
        (
            {"origin_input_ids": [5, 896, 7]},
            "input_ids holds 896; allowed are the model's token ids, 0 to 895.",
        ),
        ({"origin_input_ids": [5, -1]}, "input_ids holds -1;"),
        ({"top_k": 2**40}, "top_k is 1099511627776; allowed are 1 to 2147483647"),
        ({"min_new_tokens": 5, "stop_token_ids": [3, 1200]}, "stop_token_ids holds 1200;"),
        ({"min_new_tokens": 5, "stop_token_ids": [-4]}, "stop_token_ids holds -4;"),
    ],
)
def test_what_would_end_the_scheduler_is_a_fault(given, told):
    assert request_fault(request(**given)).startswith(told)


@pytest.mark.parametrize(
    "given", [{}, {"top_k": 2**31 - 1}, {"top_k": -1}, {"stop_token_ids": [9999]}, {"min_new_tokens": 5}]
)
def test_all_else_is_none(given):
    assert request_fault(request(**given)) is None


def test_all_unsupported_fields_are_told_at_once_and_each_reason_once():
    told = request_refusal(request(beam_width=2, watermark={"key": "ab12"}, input_embeds=[[0.0]]))
    assert "does not support beam search, watermarks, input embeddings yet" in told
    assert "gives beam_width > 1, watermark, input_embeds." in told


def test_the_request_fields_are_those_of_sglang():
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req.__init__)
    assert [name for name in REQ_FIELDS if not re.search(rf"self\.{name}\b", source)] == []


# --- models ---


def model_config(text=None, **given):
    fields = {
        "hf_config": SimpleNamespace(architectures=["SomeModel"]),
        "hf_text_config": SimpleNamespace(**(text or {})),
        "attention_arch": SimpleNamespace(name="MHA"),
        "attention_chunk_size": None,
        "linear_attn_registry_result": None,
        "is_multimodal": False,
        "is_generation": True,
    }
    return SimpleNamespace(**(fields | given))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (model_config(attention_arch=SimpleNamespace(name="MLA")), "multi-head latent attention"),
        (model_config(attention_arch=SimpleNamespace(name="LINEAR")), "no softmax attention"),
        (model_config(attention_chunk_size=8192), "attends in chunks of 8192 tokens"),
        (model_config({"layer_types": ["full_attention", "linear_attention"]}), "type linear_attention"),
        (model_config(linear_attn_registry_result=("x",)), "recurrent layers"),
        (model_config({"mamba_chunk_size": 256}), "recurrent layers"),
        (model_config(is_multimodal=True), "is multimodal"),
        (model_config(is_generation=False), "does not generate text"),
        (model_config({"attn_logit_softcapping": 50.0}), "caps its attention logits"),
    ],
)
def test_a_model_is_refused_with_its_name_and_the_reason(config, told):
    assert re.match(f"SomeModel .*{told}", model_refusal(config))


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"use_sliding_window": False, "sliding_window": 4096},  # Qwen writes a window that it does not use
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None},
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_a_plain_model_is_served(text):
    assert model_refusal(model_config(text)) is None


def test_the_bundled_model_is_served():
    from sglang.srt.configs.model_config import ModelConfig

    assert model_refusal(ModelConfig(str(MODEL))) is None


def attention_layer(**given):
    fields = {
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "qk_head_dim": 64,
        "v_head_dim": 64,
    }
    return SimpleNamespace(**(fields | given))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"logit_cap": 30.0}, "logits at 30.0"),
        ({"is_cross_attention": True}, "not causal self-attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "not causal self-attention"),
        ({"v_head_dim": 32}, "keys of 64 and values of 32"),
    ],
)
def test_a_layer_is_refused_with_the_reason(given, told):
    assert told in unsupported_layer(attention_layer(**given))


@pytest.mark.parametrize("window", [-1, None, 128])
def test_a_plain_layer_is_served(window):
    assert unsupported_layer(attention_layer(sliding_window_size=window)) is None
