"""Every kind of decoder that SPARSESPEC serves: a tiny random model of each, ids equal to plain decoding.

Not part of `make test`: a pair of servers each takes a minute or two. `make test-models` runs it, and
`make test-models PYTEST_FLAGS="-k mistral"` one of them.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from farm import generate, make_model, make_server, parted

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SHAPE = {
    "vocab_size": 896,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Full attention in the middle layer only, and windows that the shortest prompt fills already.
WINDOWS = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# name: (configuration class of transformers, what differs from SHAPE)
ARCHITECTURES = {
    "llama-multi-head": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen2-yarn": ("Qwen2Config", {"use_sliding_window": False, "rope_parameters": YARN}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 48, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "glm4": ("Glm4Config", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "attention_multiplier": 0.2}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.25}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 32, **EXPERTS}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, **WINDOWS}),
    "olmo3": ("Olmo3Config", WINDOWS),
    "cohere2": ("Cohere2Config", {"logit_scale": 1.0, **WINDOWS}),
    "granite-swa": ("GraniteSWAConfig", WINDOWS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
}


# Those that SGLang serves on GPUs only. (It takes EXAONE's heads for hidden_size / heads wide, and routers of
# gpt-oss for 32 bits beside bfloat16 only.)
ON_GPUS = {
    "gpt-oss": (
        "GptOssConfig",
        {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, **WINDOWS},
        ("--attention-backend", "triton"),
    ),
    "exaone4": ("Exaone4Config", {"hidden_size": 256, "sliding_window_pattern": "LGL", **WINDOWS},
                ("--attention-backend", "triton", "--dtype", "float16")),
}  # fmt: skip


# In 16 bits two correct servers part where two tokens' log-probabilities are nearer than this.
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    shared = [rng.randrange(10, 800) for _ in range(40)]
    return [shared + [rng.randrange(10, 800) for _ in range(n)] for n in (5, 64, 130, 300)]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_ids_equal_those_of_plain_decoding(name, prompts, tmp_path):
    compare(name, *ARCHITECTURES[name], prompts, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang serves these on GPUs only")
@pytest.mark.parametrize("name", list(ON_GPUS))
def test_ids_equal_those_of_plain_decoding_on_a_gpu(name, prompts, tmp_path):
    kind, changes, args = ON_GPUS[name]
    compare(name, kind, changes, prompts, tmp_path, args=args, near_tie=NEAR_TIE)


def compare(name, kind, changes, prompts, tmp_path, *, args=(), near_tie=0.0):
    model = make_model(tmp_path / "model", kind, {**SHAPE, **changes}, seed=7)
    config = {"stride": 3, "min_tokens": 16, "schedule": "unified" if len(name) % 2 else "lockstep"}
    plain = make_server(model, tmp_path / "plain.log", config=None, args=args)
    ours = make_server(model, tmp_path / "sparsespec.log", config=json.dumps(config), args=args)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        for server in pool.map(lambda server: stack.enter_context(server), (plain, ours)):
            assert server.pid
        alone = [generate(plain, [prompt], max_new_tokens=40)[0]["output_ids"] for prompt in prompts]
        together = generate(ours, prompts, max_new_tokens=40)
        gaps = [
            parted(plain, prompt, reply["output_ids"], ids)
            for prompt, reply, ids in zip(prompts, together, alone, strict=True)
        ]
    assert max(gaps) <= near_tie, gaps
    assert all(reply["meta_info"]["spec_verify_ct"] < 40 for reply in together), "some drafts were right"
    assert len({tuple(ids) for ids in alone}) > 1, "a model that always says the same shows nothing"
