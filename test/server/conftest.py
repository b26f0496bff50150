"""The servers of this folder's tests, in the order in which the tests use them."""

import json

import pytest
from farm import (
    REASONER,
    Farm,
    Spec,
    generate,
    generate_with,
    make_random_model,
    other_weights,
    update_weights,
)
from sglang_sparsespec._client import encode_prompts, load_problems

# The shorter half of the demo's problems: their chains take a few hundred tokens each.
PROBLEMS = sorted(load_problems(REASONER.parent / "demo-prompts.jsonl"), key=lambda p: len(p.prompt))[:7]
OPTIMIZED = (("PYTHONOPTIMIZE", "1"),)


def _spec(name, model, *, args=(), env=(), **config):
    return Spec(name, model, json.dumps(config), args, env)


PROCESSORS = ("--enable-custom-logit-processor",)
PLAN = [
    # References: stock SGLang, with our plugin switched off and, once, loaded but not selected.
    Spec("plain-reasoner", "reasoner", env=(("SGLANG_PLUGINS", "sparsespec_cpu"),)),
    Spec("plain-with-plugin", "reasoner"),
    # Without overlap: with it, SGLang counts each token one step late for penalties.
    Spec("plain-qwen3", "qwen3", args=("--disable-overlap-schedule", *PROCESSORS)),
    Spec("plain-llama", "llama", args=("--disable-overlap-schedule",)),
    # Every selector and debug mode, k in {1, 3, 8}, both schedules and index scopes, host-planned rounds and
    # those of the CUDA-graph path (torch_paged); every other one under -O.
    _spec("pillar-k8", "reasoner", stride=8, min_tokens=64, args=("--enable-metrics",)),
    _spec(
        "window-k8",
        "reasoner",
        stride=8,
        min_tokens=64,
        selector="window",
        draft_weights="int8",
        env=OPTIMIZED,
    ),
    _spec("wrong-k3-unified", "reasoner", stride=3, debug_drafts="wrong", schedule="unified"),
    _spec("full-k8", "reasoner", stride=8, budget_ratio=1.0, env=OPTIMIZED),
    _spec(
        "pillar-k1-synchronous",
        "reasoner",
        stride=1,
        min_tokens=16,
        attention="torch_paged",
        adapt="on",
        schedule="auto",
        draft_weights="int4",
        args=("--disable-overlap-schedule",),
    ),
    _spec(
        "random-k3-storm",
        "reasoner",
        stride=3,
        min_tokens=16,
        selector="random",
        schedule="unified",
        args=("--max-total-tokens", "6000", "--chunked-prefill-size", "256"),
        env=(("SGLANG_TEST_RETRACT", "1"), *OPTIMIZED),
    ),
    _spec(
        "offload-k4",
        "reasoner",
        stride=4,
        min_tokens=32,
        attention="torch_paged",
        offload="on",
        checkpoint_tokens=64,
        admit_ahead=32,
        args=("--max-total-tokens", "2000", "--hicache-ratio", "6"),
    ),
    _spec(
        "limit-k8",
        "reasoner",
        stride=8,
        min_tokens=32,
        attention="torch_paged",
        adapt="on",
        lookup="on",
        args=("--context-length", "160"),
    ),
    _spec(
        "pillar-k3-heads",
        "qwen3",
        stride=3,
        min_tokens=8,
        index_scope="kv_head",
        schedule="unified",
        score_every=2,
        args=PROCESSORS,
        env=OPTIMIZED,
    ),
    _spec("full-k1", "qwen3", stride=1, budget_ratio=1.0, attention="torch_paged", adapt="off"),
    _spec(
        "pillar-k8-llama",
        "llama",
        stride=8,
        min_tokens=8,
        score_layer_stride=2,
        env=OPTIMIZED,
        args=("--tp", "2"),
    ),
]


@pytest.fixture(scope="session")
def farm(tmp_path_factory):
    root = tmp_path_factory.mktemp("servers")
    models = {
        "reasoner": REASONER,
        "qwen3": make_random_model(root / "qwen3", "qwen3", seed=3),
        "llama": make_random_model(root / "llama", "llama", seed=4),
        "other": other_weights(root / "other", seed=6),
    }
    farm = Farm(PLAN, models, logs=root)
    yield farm
    farm.stop_all()


@pytest.fixture(scope="session")
def problems():
    return PROBLEMS


@pytest.fixture(scope="session")
def prompts():
    """Token ids of prompts by model: seven for the random models, seven of the demo's for the reasoner."""
    import random

    rng = random.Random(5)
    shared = [rng.randrange(10, 800) for _ in range(40)]
    lengths = (5, 17, 64, 130, 255, 33, 300)
    drawn = [shared + [rng.randrange(10, 800) for _ in range(n)] for n in lengths]
    return {"reasoner": encode_prompts(PROBLEMS, str(REASONER)), "qwen3": drawn, "llama": drawn}


TOKENS = {"reasoner": 1300, "qwen3": 40, "llama": 40}


@pytest.fixture(scope="session")
def references(farm, prompts):
    """Ids and log-probabilities of every prompt without speculation, by model. Computed once, one after
    another."""
    found = {}
    for model, ids in prompts.items():
        server = farm.get(f"plain-{model}")
        found[model] = [
            {
                "ids": reply["output_ids"],
                "text": reply["text"],
                "logprobs": [p[0] for p in reply["meta_info"]["output_token_logprobs"]],
                "finish": reply["meta_info"]["finish_reason"]["type"],
            }
            for reply in generate(
                server, ids, max_new_tokens=TOKENS[model], ignore_eos=model != "reasoner", return_logprob=True
            )
        ]
        if model == "reasoner":
            several, params = structured(ids)
            found["structured"] = [
                generate(server, [prompt], **own)[0]["output_ids"]
                for prompt, own in zip(several, params, strict=True)
            ]
            found["info"] = _info(server)
            found["models"] = farm.models
            found["other"] = with_weights(server, farm.models["other"], ids[:3])
            with_weights(server, farm.models["reasoner"], ids[:1])
            found["info-with-plugin"] = _info(farm.get("plain-with-plugin"))
            found["with-plugin"] = [
                reply["output_ids"]
                for reply in generate(
                    farm.get("plain-with-plugin"), ids[:3], max_new_tokens=100, ignore_eos=False
                )
            ]
        if model != "reasoner":
            several, params = adjusted(ids)
            found[f"adjusted-{model}"] = []
            for prompt, own in zip(several, params, strict=True):
                found[f"adjusted-{model}"] += [agreed(server, prompt, own)]
        if model == "qwen3":
            found["processed"] = [generate_with(server, body)["output_ids"] for body in processed(ids)]
            found["samples"] = sample_starts(server, ids[0])
    return found


def adjusted(prompts):
    """Prompts and sampling parameters that change logits, each kind alone and all together."""
    kinds = (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.6},
        {"min_new_tokens": 20, "stop_token_ids": list(range(0, 896, 3)), "ignore_eos": False},
        {"logit_bias": {"11": 9.0, "30": -100.0}},
        {},
    )
    return [prompts[i % 3] for i in range(len(kinds))], [{"max_new_tokens": 30, **kind} for kind in kinds]


def agreed(server, prompt, params):
    """What plain decoding says twice in a row. SGLang loses a count of a request with penalties that joins
    one without which has just ended; the second one joins at most one with."""
    last = None
    for _ in range(6):
        found = generate(server, [prompt], **params)[0]["output_ids"]
        if found == last:
            return found
        last = found
    raise AssertionError(f"plain decoding says something else each time: {params}")


def with_weights(server, model, ids):
    """What the server puts out once it has taken the weights of `model`."""
    update_weights(server, model)
    return [r["output_ids"] for r in generate(server, ids, max_new_tokens=60, ignore_eos=False)]


def processed(prompts):
    """Bodies of requests with logit processors: some tokens forbidden, and budgets of thinking."""
    from sglang.srt.sampling import custom_logit_processor as of_sglang

    # Made here, its class is sent by value: the server cannot import this folder.
    ids = {"THINKING_START_TOKEN_ID": prompts[0][0], "THINKING_END_TOKEN_ID": 7, "NEW_LINE_TOKEN_ID": 8}
    budget = type("Budget", (of_sglang.ThinkingBudgetLogitProcessor,), {**ids, "__module__": "__main__"})
    forbid = of_sglang.DisallowedTokensLogitsProcessor
    kinds = [(budget, {"thinking_budget": len(prompts[0]) + left}) for left in (0, 5, 11)]
    kinds.append((forbid, {"token_ids": list(range(0, 800, 2))}))
    return [
        {
            "input_ids": prompts[0],
            "sampling_params": {"temperature": 0, "max_new_tokens": 30, "custom_params": params},
            "custom_logit_processor": kind.to_str(),
        }
        for kind, params in kinds
    ]


def structured(prompts):
    """Prompts and sampling parameters whose output must follow a grammar, and one without."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kinds = (
        {"regex": "(ab|cd){3,9}x"},
        {"ebnf": 'root ::= ("line " [0-9]+ "\\n")+'},
        {"json_schema": json.dumps(schema)},
        {},
        {"regex": "[a-z ]{10,40}", "logit_bias": {"30": 2.0}, "presence_penalty": 0.5},
    )
    return [prompts[i] for i in range(len(kinds))], [
        {"max_new_tokens": 30, "ignore_eos": False, **kind} for kind in kinds
    ]


def _info(server):
    import requests

    return requests.get(f"{server.url}/server_info", timeout=30).json()


def sample_starts(server, prompt, *, count=2000, batch=250):
    """The first five tokens of `count` samples at temperature 0.8."""
    starts = []
    for _ in range(count // batch):
        replies = generate(server, [prompt] * batch, temperature=0.8, top_p=0.95, max_new_tokens=5)
        starts += [tuple(reply["output_ids"]) for reply in replies]
    return starts
