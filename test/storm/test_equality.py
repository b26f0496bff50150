"""Requests of mixed parameters beside each other: ids, texts, log-probabilities and ends are those that plain
decoding gives to each alone.

Not part of `make test`: `make test-storm` runs it. The seed is in the output.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from farm import REASONER, generate_with, make_random_model, make_server, wait_until_idle
from sglang_sparsespec._client import encode_prompts, load_problems

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

SEED = int(os.environ.get("STORM_SEED", str(random.randrange(10**6))))
COUNT = int(os.environ.get("STORM_REQUESTS", "250"))  # of each model
CONFIGS = {
    "reasoner": {"stride": 4, "min_tokens": 32, "attention": "torch_paged", "lookup": "on", "adapt": "on"},
    "qwen3": {"stride": 3, "min_tokens": 8, "index_scope": "kv_head", "schedule": "unified"},
}
ARGS = {"reasoner": ("--dp-size", "2"), "qwen3": ()}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# One of each row, most of them seldom.
PARAMETERS = {
    "temperature": [0],
    "frequency_penalty": [1.5, -0.5, 0.3],
    "presence_penalty": [1.0],
    "repetition_penalty": [1.4, 0.9],
    "logit_bias": [{"11": 3.0}, {"30": -100.0, "12": 1.0}],
    "min_new_tokens": [1, 12],
    "stop_token_ids": [[11, 12], [100, 200, 300, 400]],
    "stop": [["1"], ["so", "\n"], [" then"]],
    "regex": ["(ab|cd)+x", "[0-9]{3,9}"],
    "json_schema": [json.dumps(SCHEMA)],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "no_stop_trim": [True],
    "top_k": [1, 7],
}


def bodies_of(rng, prompts, count):
    bodies = []
    for _ in range(count):
        params = {"max_new_tokens": rng.choice([1, 2, 3, 9, 24, 40]), "temperature": 0}
        params |= {name: rng.choice(values) for name, values in PARAMETERS.items() if rng.random() < 0.12}
        if "regex" in params:
            params.pop("json_schema", None)
        if "regex" in params or "json_schema" in params:
            params.pop("ignore_eos", None)  # plain decoding sees one token late that the grammar has ended
            params.pop("min_new_tokens", None)  # a grammar that wants to end then allows nothing at all
        if "repetition_penalty" in params:
            # SGLang keeps its penalties in a set: which of them it applies first differs from run to run.
            params.pop("frequency_penalty", None)
            params.pop("presence_penalty", None)
        params["min_new_tokens"] = min(params.get("min_new_tokens", 0), params["max_new_tokens"])
        prompt = rng.choice(prompts)
        body = {"input_ids": prompt[: rng.randrange(1, len(prompt))], "sampling_params": params}
        if rng.random() < 0.3:
            body |= {"return_logprob": True, "top_logprobs_num": rng.choice([0, 2])}
            body["logprob_start_len"] = rng.choice([-1, 0])
        bodies.append(body)
    return bodies


def said(reply):
    meta = reply["meta_info"]
    usage = meta["prompt_tokens"], meta["completion_tokens"]
    return reply["output_ids"], reply["text"], json.dumps(meta["finish_reason"], sort_keys=True), usage


def alone(server, body):
    """What plain decoding says twice in a row: SGLang loses a count of a request with penalties that joins
    one without which has just ended."""
    last = None
    for _ in range(6):
        reply = generate_with(server, body)
        if last is not None and said(reply) == said(last):
            return reply
        last = reply
    raise AssertionError(f"plain decoding says something else each time: {body}")


@pytest.mark.parametrize("model", list(CONFIGS))
def test_what_is_said_is_what_plain_decoding_says(model, tmp_path):
    print(f"\nSTORM_SEED={SEED}, {COUNT} requests")
    rng = random.Random(f"{SEED} {model}")
    path = REASONER if model == "reasoner" else make_random_model(tmp_path / "model", model, seed=3)
    if model == "reasoner":
        prompts = encode_prompts(load_problems(REASONER.parent / "demo-prompts.jsonl")[:8], str(REASONER))
    else:
        prompts = [[rng.randrange(10, 800) for _ in range(300)] for _ in range(8)]
    bodies = bodies_of(rng, prompts, COUNT)
    plain = make_server(path, tmp_path / "plain.log", config=None, args=("--disable-overlap-schedule",))
    ours = make_server(path, tmp_path / "sparsespec.log", config=json.dumps(CONFIGS[model]), args=ARGS[model])
    with ThreadPoolExecutor(16) as pool, ExitStack() as stack:
        list(pool.map(stack.enter_context, (plain, ours)))
        wanted = [alone(plain, body) for body in bodies]
        found = list(pool.map(lambda body: generate_with(ours, body), bodies))
        wait_until_idle(ours)
    differing = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if said(a) != said(b)]
    for i in differing[:5]:
        print(json.dumps(bodies[i]["sampling_params"]), said(found[i]), said(wanted[i]), sep="\n  ")
    assert not differing, f"{len(differing)} of {COUNT} differ"
    for body, ours_said, plain_said in zip(bodies, found, wanted, strict=True):
        if body.get("return_logprob"):
            check_logprobs(ours_said["meta_info"], plain_said["meta_info"], body["sampling_params"])


def check_logprobs(found, wanted, params):
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1] for entry in found[name]] == [entry[1] for entry in wanted[name]]
        values = [[entry[0] for entry in of[name] if entry[0] is not None] for of in (found, wanted)]
        assert values[0] == pytest.approx(values[1], abs=2e-3), params
