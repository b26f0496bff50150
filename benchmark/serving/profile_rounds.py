"""Where the time of a round goes: kernels by kind, and how long the GPU waited for the host.

    cd benchmark/serving
    python profile_rounds.py --model-path DIR --out profile.json --context 8192 --concurrency 48

Starts a SPARSESPEC server, lets N requests of L tokens decode, and reads SGLang's own profile (torch
profiler) of a few rounds. A micro-step begins with the kernel that prepares its inputs.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import cell as cells
import results
import traces
from sglang_sparsespec._server import ServerProcess
from sglang_sparsespec.config import CONFIG_ENV

KINDS = (
    ("GEMM", r"few_rows_kernel"),
    ("rows to fp8", r"_quantise_row"),
    ("fused verify + score", r"sparsespec::|verify_kernel|merge_kernel"),
    ("score", r"_score_kernel"),
    ("select", r"_select_kernel"),
    ("round metadata", r"_prepare_kernel|_pages_kernel|_finish_kernel|_settle_kernel"),
    ("norm, rope, activation, KV store", r"norm|rope|rotary|silu|act_and_mul|store_kv"),
    ("attention", r"flash::|[Ff]lash[Aa]tt|fmha|prepare_varlen"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|splitK"),
)
PREPARE = "_prepare_kernel"
VERIFY_MARK = "_verify_pages_kernel"


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def micro_steps(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """GPU kernels of a trace in order of time, cut where a micro-step begins."""
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"]
    )
    steps: list[list[dict[str, Any]]] = []
    for event in kernels:
        if PREPARE in event["name"]:
            steps.append([])
        if steps:
            steps[-1].append(event)
    return steps[:-1]  # the last one may be cut off


def summarise(steps: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Mean microseconds a micro-step by kind of kernel, for drafts and verifications; and idle time."""
    found: dict[str, dict[str, float]] = {}
    names: dict[str, dict[str, float]] = {}
    for phase in ("draft", "verify"):
        mine = [s for s in steps if any(VERIFY_MARK in e["name"] for e in s) == (phase == "verify")]
        spent: dict[str, float] = defaultdict(float)
        by_name: dict[str, float] = defaultdict(float)
        for step in mine:
            end = step[0]["ts"]
            for event in step:
                spent[kind_of(event["name"])] += event["dur"]
                by_name[event["name"][:90]] += event["dur"]
                spent["idle within"] += max(0.0, event["ts"] - end)
                end = max(end, event["ts"] + event["dur"])
            spent["all"] += end - step[0]["ts"]
        found[phase] = {k: round(v / len(mine), 1) for k, v in spent.items()} if mine else {}
        found[phase]["micro-steps"] = len(mine)
        top = sorted(by_name.items(), key=lambda item: -item[1])[:14]
        names[phase] = {k: round(v / max(len(mine), 1), 1) for k, v in top}
    gaps = [nxt[0]["ts"] - max(e["ts"] + e["dur"] for e in step) for step, nxt in itertools.pairwise(steps)]
    found["between micro-steps"] = {
        "mean": round(sum(gaps) / max(len(gaps), 1), 1),
        "largest": round(max(gaps, default=0.0), 1),
    }
    return {"mean_us": found, "largest_kernels_us": names}


async def profile(url: str, prompts: list[list[int]], folder: Path, steps: int) -> None:
    """Let all prompts decode and profile `steps` rounds."""
    started = asyncio.Event()

    def on_change(streams: list[cells.Stream]) -> None:
        if all(stream.tokens for stream in streams):
            started.set()

    running = asyncio.create_task(
        cells.run_streams(url, prompts, new_tokens=400, lead=0, timeout_s=300, on_change=on_change)
    )
    await asyncio.wait([running, asyncio.create_task(started.wait())], return_when="FIRST_COMPLETED")
    body = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{url}/start_profile", json=body),
    ):
        pass
    await running


async def unprofiled(url: str, prompts: list[list[int]]) -> dict[str, float | None]:
    """The same requests once more, without the profiler; their prompts are in the radix cache by now."""
    streams, _ = await cells.run_streams(url, prompts, new_tokens=256, lead=0, timeout_s=300)
    window = cells.measure(streams)
    return {
        "tokens_per_s": round(window.tokens_per_s, 1),
        "round_ms": round(window.step_ms, 2),
        "acceptance_length": window.acceptance_length and round(window.acceptance_length, 3),
    }


def read_trace(folder: Path, patience_s: float = 60) -> list[dict[str, Any]]:
    """Events of the trace that the server writes. Raises FileNotFoundError when none comes."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        for path in folder.rglob("*.json.gz"):
            try:
                return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            except (OSError, EOFError, json.JSONDecodeError):
                pass  # still being written
        time.sleep(1)
    raise FileNotFoundError(f"the server wrote no trace into {folder} within {patience_s:.0f} s.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, nargs="+", default=[8192])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[48])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sparsespec-config", default="{}")
    parser.add_argument("--server-flag", action="append", default=[], help="one word each")
    args = parser.parse_args()
    report: dict[str, Any] = {**results.header(), "options": vars(args) | {"out": args.out.name}, "runs": []}
    encode = traces.load_encoder(args.model_path)
    flags = [*args.server_flag, "--speculative-algorithm", "SPARSESPEC"]
    flags += ["--max-running-requests", str(max(args.concurrency))]
    server = ServerProcess(
        args.model_path,
        flags,
        env={CONFIG_ENV: args.sparsespec_config},
        log_path=args.out.with_suffix(".log"),
    )
    with server:
        for context, requests in itertools.product(args.context, args.concurrency):
            made = traces.make_traces(requests, context, 400, seed=1, encode=encode)
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(profile(server.url, [t.ids for t in made], Path(folder), args.rounds))
                events = read_trace(Path(folder))
            run = {"context": context, "concurrency": requests, **summarise(micro_steps(events))}
            run["unprofiled"] = asyncio.run(unprofiled(server.url, [t.ids for t in made]))
            report["runs"].append(run)
            print(json.dumps(run, indent=1), flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
