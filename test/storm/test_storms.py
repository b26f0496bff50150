"""Storms: whatever is sent, every answer is one or a 4xx, nothing hangs, nothing leaks, and a canary's output
stays what it was.

Not part of `make test`: `make test-storm` takes about ten minutes. Seeds are in the output.
"""

import itertools
import json
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from farm import REASONER, generate, make_server, other_weights, update_weights, wait_until_idle
from sglang_sparsespec._client import encode_prompts, load_problems
from storms import DEVICE_PLANNED, params_of, processes_of, wait_for_its_end

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

CONFIGS = {
    "host-planned": {
        "stride": 3,
        "min_tokens": 16,
        "schedule": "unified",
        "index_scope": "kv_head",
        "attention": "torch",
    },
    "device-planned": {
        "stride": 4,
        "min_tokens": 16,
        "schedule": "auto",
        "adapt": "on",
        "attention": DEVICE_PLANNED,
        # The kernels of GPUs do not take layers as small as this model's; references do.
        **({} if DEVICE_PLANNED == "auto" else {"draft_weights": "int4"}),
    },
    "offloading": {
        "stride": 4,
        "min_tokens": 16,
        "attention": DEVICE_PLANNED,
        "lookup": "on",
        "adapt": "on",
        "offload": "on",
        "checkpoint_tokens": 64,
        "admit_ahead": 16,
    },
}
# A pool that a third of the requests fills, and requests that are taken out of it at random.
ARGS = (
    "--max-total-tokens", "5000", "--chunked-prefill-size", "256", "--enable-custom-logit-processor",
    "--hicache-ratio", "2",  # of use to the one that offloads
)  # fmt: skip
SEED = int(os.environ.get("STORM_SEED", str(random.randrange(10**6))))


@pytest.fixture(scope="module")
def prompts():
    return encode_prompts(load_problems(REASONER.parent / "demo-prompts.jsonl")[:8], str(REASONER))


@pytest.fixture(scope="module", params=list(CONFIGS))
def server(request, tmp_path_factory):
    log = tmp_path_factory.mktemp("storm") / f"{request.param}.log"
    env = {"SGLANG_TEST_RETRACT": "1"}
    print(f"\nSTORM_SEED={SEED}, {request.param}, log {log}")
    with make_server(REASONER, log, config=json.dumps(CONFIGS[request.param]), args=ARGS, env=env) as server:
        yield server


@pytest.fixture
def canary(server, prompts):
    """Runs a test between two looks at the same prompt's output, and ends it with an empty pool."""
    before = generate(server, prompts[:1], max_new_tokens=50)[0]["output_ids"]
    yield
    wait_until_idle(server)
    assert generate(server, prompts[:1], max_new_tokens=50)[0]["output_ids"] == before
    wait_until_idle(server)
    assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 200
    log = server.log_path.read_text(errors="replace")
    assert "leak detected" not in log and "Scheduler hit an exception" not in log


def send(server, bodies, *, at_once, patience=lambda: 300.0):
    """The ends of all requests: HTTP statuses, and "gone" for those whose client left."""

    def one(body):
        try:
            reply = requests.post(f"{server.url}/generate", json=body, timeout=(60, patience()))
        except requests.exceptions.ReadTimeout:
            return "gone"
        if reply.status_code == 200 and not body.get("stream"):
            answers = reply.json() if isinstance(reply.json(), list) else [reply.json()]
            for answer in answers:
                assert answer["meta_info"]["finish_reason"]["type"] in ("length", "stop", "abort"), answer
                assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]), answer
        assert reply.status_code == 200 or 400 <= reply.status_code < 500, (
            body,
            reply.status_code,
            reply.text,
        )
        return reply.status_code

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, bodies))


BAD = (
    {"temperature": -1.0},
    {"top_p": 1.7},
    {"min_p": -0.1},
    {"frequency_penalty": 9.0},
    {"max_new_tokens": -3},
    {"logit_bias": {"999999": 1.0}},
    {"regex": "(((", "max_new_tokens": 5},
    {"json_schema": "{bad", "max_new_tokens": 5},
    {"ebnf": "root ::= (", "max_new_tokens": 5},
    {"min_new_tokens": 9, "max_new_tokens": 2},
    {"sampling_seed": "seven"},
    {"unknown_parameter": 1},
    {"n": 0},
)


def test_parameters_of_every_kind(server, prompts, canary):
    rng, bodies = random.Random(SEED), []
    for _ in range(220):
        params = {**rng.choice(BAD)} if rng.random() < 0.2 else params_of(rng)
        body = {"input_ids": rng.choice(prompts)[: rng.choice([1, 30, 200])], "sampling_params": params}
        if rng.random() < 0.3:
            body |= {"return_logprob": True, "top_logprobs_num": rng.choice([0, 2])}
        if rng.random() < 0.2:
            body["stream"] = True
        if rng.random() < 0.05:
            body["input_ids"] = rng.choice([[], [10**7], [-1]])
        bodies.append(body)
    ends = send(server, bodies, at_once=20)
    assert ends.count(200) > 120 and len(ends) - ends.count(200) > 15


def test_clients_that_leave(server, prompts, canary):
    rng = random.Random(SEED + 1)
    bodies = [
        {
            "input_ids": rng.choice(prompts)[:60],
            "sampling_params": {**params_of(rng), "max_new_tokens": 60, "n": 1},
        }
        for _ in range(160)
    ]
    ends = send(server, bodies, at_once=32, patience=lambda: rng.choice([0.05, 0.4, 1.5, 300.0]))
    assert ends.count("gone") > 20 and ends.count(200) > 20


def test_prefixes_that_are_shared_and_dropped(server, prompts, canary):
    rng, bodies = random.Random(SEED + 2), []
    for _ in range(120):
        first, second = rng.sample(prompts, 2)
        ids = first[: rng.randrange(1, 250)] + second[: rng.randrange(0, 100)]
        bodies.append({"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 12}})
    again = rng.sample(bodies, 30)
    wanted = [generate(server, [body["input_ids"]], max_new_tokens=12, ignore_eos=False) for body in again]
    assert set(send(server, bodies, at_once=24)) == {200}
    found = [generate(server, [body["input_ids"]], max_new_tokens=12, ignore_eos=False) for body in again]
    assert [a[0]["output_ids"] for a in found] == [a[0]["output_ids"] for a in wanted]


def retractions(server):
    """How often requests were taken out of the batch."""
    return len(re.findall("#retracted_reqs: [1-9]", server.log_path.read_text(errors="replace")))


def streamed(server, prompt, tokens):
    """(ids, text) of every part of a stream, and its last log-probabilities."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True, "return_logprob": True}
    parts, last = [], {}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])
                parts.append((last["output_ids"], last["text"]))
    return parts, [entry[1] for entry in last["meta_info"]["output_token_logprobs"]]


def test_streams_have_no_gaps_over_retractions(server, prompts, canary):
    ids = [prompts[i % len(prompts)][: 40 + 3 * i] for i in range(24)]
    wanted = [generate(server, [one], max_new_tokens=60)[0]["output_ids"] for one in ids]
    before = retractions(server)
    with ThreadPoolExecutor(24) as pool:
        streams = list(pool.map(lambda one: streamed(server, one, 60), ids))
    assert retractions(server) > before
    for (parts, scored), own in zip(streams, wanted, strict=True):
        for (before, text), (after, longer) in itertools.pairwise(parts):
            assert after[: len(before)] == before and longer.startswith(text.rstrip("\ufffd"))
        assert parts[-1][0] == own == scored


def test_weight_updates_under_load(server, prompts, canary, tmp_path):
    other, stop, ends = other_weights(tmp_path / "other", seed=3), threading.Event(), []

    def load():
        rng = random.Random(SEED + 3)
        while not stop.is_set():
            body = {"input_ids": rng.choice(prompts)[:80], "sampling_params": {"max_new_tokens": 20}}
            ends.extend(send(server, [body] * 4, at_once=4))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load)
        for model in (other, REASONER, other, REASONER):
            time.sleep(2)
            update_weights(server, model)
        stop.set()
        running.result(timeout=120)
    assert set(ends) == {200}


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_process_that_is_killed_ends_the_server_and_leaves_nothing(victim, prompts, tmp_path):
    server = make_server(REASONER, tmp_path / "killed.log", config=json.dumps(CONFIGS["host-planned"]))
    with server:
        group = processes_of(server)
        pids = [pid for pid, title in group.items() if victim in title]
        assert pids, group
        with ThreadPoolExecutor(1) as pool:
            body = {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            asked = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=60)
            time.sleep(2)
            os.kill(pids[0], signal.SIGKILL)
            wait_for_its_end(server)
            assert asked.exception(timeout=60) is not None or asked.result().status_code >= 400


@pytest.mark.parametrize("when", ["starting", "decoding"])
def test_a_server_that_is_told_to_end_ends(when, prompts, tmp_path):
    server = make_server(REASONER, tmp_path / "ended.log", config=json.dumps(CONFIGS["device-planned"]))
    server.start()
    try:
        if when == "decoding":
            server.wait_ready()
            body = {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            threading.Thread(
                target=lambda: requests.post(f"{server.url}/generate", json=body, timeout=60), daemon=True
            ).start()
            time.sleep(2)
        else:
            time.sleep(25)  # weights and rounds are being made
        os.kill(server.pid, signal.SIGTERM)
        wait_for_its_end(server)
    finally:
        server.stop()
