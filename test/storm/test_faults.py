"""Faults that are put into a running server: whatever breaks, every request ends, no process stays behind and
the port is free again.

Not part of `make test`: `make test-storm` runs it.
"""

import json
import os
import socket
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from farm import REASONER, generate, make_server
from sglang_sparsespec._client import encode_prompts, load_problems
from storms import DEVICE_PLANNED, wait_for_its_end

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

PLUGIN = '''
"""Breaks a function of SPARSESPEC in its Nth call: an SGLang plugin."""

import importlib
import os


def register():
    where, name, kind, call = os.environ["FAULT"].split()
    holder = importlib.import_module(where)
    *path, name = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    original, calls = getattr(holder, name), [0]

    def faulty(*args, **kwargs):
        calls[0] += 1
        if calls[0] != int(call):
            return original(*args, **kwargs)
        if kind == "raise":
            raise RuntimeError("a fault that was put in")
        result = original(*args, **kwargs)
        broken = result[-1] if isinstance(result, tuple) else result
        broken.fill_(float("nan") if kind == "nan" else 10**9)
        return result

    setattr(holder, name, faulty)
'''
HOST = {"stride": 3, "min_tokens": 16, "attention": "torch"}
DEVICE = {**HOST, "attention": DEVICE_PLANNED}
EAGER = {**HOST, "attention": "torch_paged"}
NO_GRAPHS = ("--cuda-graph-backend-decode", "disabled")
TAIL, WORKER = "sglang_sparsespec.rounds.eager", "sglang_sparsespec.worker"
MICRO_STEP = "sglang_sparsespec.rounds.graphs MicroStepGraphs.run"
FATAL = {
    "draft": (HOST, f"{TAIL} store_drafts raise 20"),
    "verify": (HOST, f"{TAIL} accept_verified raise 20"),
    "select": (HOST, "sglang_sparsespec.selection.interface Selector.select raise 50"),
    "plan": (DEVICE, "sglang_sparsespec.rounds.device DeviceRounds.upload raise 20"),
    "model": (EAGER, f"{WORKER} SparseSpecWorker._forward_device raise 60"),
    "micro-step": (DEVICE, f"{MICRO_STEP} raise 60"),
    "output": (DEVICE, f"{WORKER} SparseSpecWorker.on_verify_complete_cpu raise 20"),
    "selection-out-of-range": (
        HOST,
        "sglang_sparsespec.attention.backend SparseSpecAttentionBackend.draft_slots index 90",
    ),
}
SURVIVED = {
    "nan-on-the-host-path": (HOST, f"{WORKER} SparseSpecWorker._forward_eager nan 30"),
    "nan-on-the-device-path": (EAGER, f"{WORKER} SparseSpecWorker._forward_device nan 30"),
    "nan-after-a-graph": (DEVICE, f"{MICRO_STEP} nan 30"),
}


@pytest.fixture
def prompts():
    return encode_prompts(load_problems(REASONER.parent / "demo-prompts.jsonl")[:6], str(REASONER))


def faulty_server(tmp_path, config, fault):
    plugin = tmp_path / "plugin"
    (plugin / "faulty-0.dist-info").mkdir(parents=True)
    (plugin / "faulty.py").write_text(PLUGIN)
    about = plugin / "faulty-0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        textwrap.dedent("""
            [sglang.srt.plugins]
            faulty = faulty:register
        """)
    )
    paths = [str(plugin), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    env = {"FAULT": fault, "PYTHONPATH": ":".join(paths)}
    args = NO_GRAPHS if config is EAGER else ()  # replays do not call what is to break
    return make_server(REASONER, tmp_path / "faulty.log", config=json.dumps(config), args=args, env=env)


def asked(server, prompts):
    """The ends of requests that run when the fault comes: a status, or the name of an exception."""

    def one(i):
        params = {"max_new_tokens": 200, "ignore_eos": True, "temperature": i % 2}
        body = {"input_ids": prompts[i % len(prompts)], "sampling_params": params, "stream": i % 3 == 0}
        try:
            reply = requests.post(f"{server.url}/generate", json=body, timeout=120)
            return reply.status_code, reply.text
        except requests.exceptions.Timeout:
            return "hung", ""
        except requests.exceptions.RequestException as error:
            return type(error).__name__, ""

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(one, range(6)))


@pytest.mark.parametrize("name", list(FATAL))
def test_a_fault_ends_the_server_and_every_request(name, prompts, tmp_path):
    with faulty_server(tmp_path, *FATAL[name]) as server:
        port = int(server.url.rsplit(":", 1)[1])
        ends = [end for end, _ in asked(server, prompts)]
        assert "hung" not in ends and ends.count(200) < len(ends), ends
        wait_for_its_end(server)
        assert "Scheduler hit an exception" in server.log_path.read_text(errors="replace")
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))


@pytest.mark.parametrize("name", list(SURVIVED))
def test_a_step_of_nan_logits_costs_tokens_and_nothing_else(name, prompts, tmp_path):
    config, fault = SURVIVED[name]
    where, function, kind, _ = fault.split()
    with faulty_server(tmp_path, config, f"{where} {function} {kind} 0") as server:
        wanted = generate(server, prompts[:1], max_new_tokens=40)[0]["output_ids"]
    with faulty_server(tmp_path / "again", config, fault) as server:
        ends = asked(server, prompts)
        assert [end for end, _ in ends] == [200] * len(ends), ends
        assert generate(server, prompts[:1], max_new_tokens=40)[0]["output_ids"] == wanted
        log = server.log_path.read_text(errors="replace")
        assert "Scheduler hit an exception" not in log and "leak detected" not in log
