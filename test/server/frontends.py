"""The examples of docs/examples and SGLang's own load generator, against a running server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from farm import REASONER

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"


def run(*command, **env):
    """What a Python program prints. Fails with its last lines."""
    # Elsewhere: the load generator leaves its results where it runs.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def serves_front_ends(server, prompts, references):
    told = run(EXAMPLES / "openai_chat.py", server.url)
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    assert lines["whole"].strip() == lines["streamed"].strip() != ""
    assert lines["seeded"].strip() == "True" and lines["n = 3"].strip() == "3"

    told = run(EXAMPLES / "frontend_language.py", server.url)
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    assert lines["digit"].strip() in ("1", "2", "3") and lines["reasons"].strip() == "2"
    assert lines["number"].strip().isdigit() and len(lines["number"].strip()) == 2

    host, port = server.url.removeprefix("http://").split(":")
    told = run(
        "-m", "sglang.bench_serving", "--backend", "sglang", "--host", host, "--port", port,
        "--dataset-name", "random-ids", "--num-prompts", "6", "--random-input-len", "40",
        "--random-output-len", "20", "--random-range-ratio", "1.0", "--max-concurrency", "3", "--seed", "3",
        "--tokenizer", REASONER, "--disable-tqdm",
    )  # fmt: skip
    assert "Successful requests:" in told and told.split("Successful requests:")[1].split()[0] == "6"


def rollouts(updated):
    """What the example's rollouts said: by the model, twice by `updated`, and by the model again."""
    settings = {"stride": 4, "min_tokens": 32, "attention": "torch_paged", "draft_weights": "int4"}
    told = run(
        EXAMPLES / "rollouts.py", REASONER, updated, "float32", SGLANG_SPARSESPEC_CONFIG=json.dumps(settings)
    )
    lines = [line for line in told.splitlines() if ": mean log-probability " in line]
    return [lines[at : at + 2] for at in range(0, len(lines), 2)]


def offline_engine():
    """(text, tokens, verifications) of both prompts of the example."""
    told = run(
        EXAMPLES / "offline_engine.py", REASONER, "float32",
        SGLANG_SPARSESPEC_CONFIG=json.dumps({"stride": 4, "min_tokens": 64}),
    )  # fmt: skip
    found = [line.split(": ", 1) for line in told.splitlines() if "verifications: " in line]
    return [(text, *(int(part.split()[0]) for part in counts.split(", "))) for counts, text in found]
