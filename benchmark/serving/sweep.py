"""Decode speed of one server without speculation, with SPARSESPEC and with SGLang's NGRAM, by context and
concurrency.

    cd benchmark/serving
    python sweep.py --model-path DIR --out sweep.json --context 8192 15360 --concurrency 1 16 48
    python sweep.py --model-path DIR --out sweep.json --context --prompts ../reasoner/prompts-12k.jsonl
    python sweep.py --model-path DIR --out sweep.json --context --swing 2 48
    python plot.py sweep.json --png sweep.png

    python sweep.py --model-path DIR --out ablation.json --algorithms plain,naive,unified,delayed,adaptive

The last one is the paper's ablation: lockstep rounds without overlap scheduling, unified ones, unified ones
with overlap (delayed verification), and rounds chosen by measured times.

A cell is N requests whose prompts are exactly L tokens (see traces.py), temperature 0, M new tokens each. The
clock runs from when the last request is past its prefill to when the first one ends, so it sees N requests
decode and nothing else. A cell of more tokens than the KV pool holds is reported as "does not fit". A larger
cell of the same context finds some of its prompts in the radix cache, which saves prefill.

NGRAM's memory is emptied before each cell: it would else hold the continuations of the same prompts. It then
knows nothing but the tokens of this cell, unlike on a server that generated the whole context. --lead gives
it (and all others) that many tokens before the clock starts; --prompts measures from the first token on.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import cell as cells
import results
import traces
from plot import text_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from run_prompts import run_prompts
from sglang_sparsespec._client import PromptsError
from sglang_sparsespec._server import ServerError, ServerProcess
from sglang_sparsespec.config import ConfigError
from sglang_sparsespec.demo import find_device
from sweep_options import UsageError, grid_of, parse_args, server_env, server_flags
from swing import Swing, figures

WARM_UP_TOKENS = 256


class Sweep:
    """All servers one after the other, and on each all cells and then the prompts file."""

    def __init__(self, args: argparse.Namespace, console: Console, progress: Progress) -> None:
        self.args, self.console, self.progress = args, console, progress
        self.began, self.device = time.monotonic(), find_device()
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "problems"}
        run = {**results.header(), "device": self.device, "options": options}
        self.file = results.ResultFile(args.out, {**run, "model": Path(args.model_path).name})
        self.grid = grid_of(args)
        self.warm_up: list[list[int]] = []
        self.prompts: dict[int, list[traces.Trace]] = {}
        self.plain_ids: dict[tuple[int, int], list[list[int]]] = {}
        parts = len(self.grid) + bool(args.problems) + bool(args.swing)
        self.task = progress.add_task("", total=len(args.algorithms) * parts)
        self.failed = False

    def run(self) -> int:
        """Measure everything; returns the exit status."""
        self._make_prompts()
        for algorithm in self.args.algorithms:
            if self._late():
                self._note(f"{algorithm}: not started, --time-limit is over.")
                self.failed = True
                continue
            self._serve(algorithm)
        return 1 if self.failed else 0

    def _make_prompts(self) -> None:
        args = self.args
        self.progress.update(self.task, description="making prompts")
        encode = traces.load_encoder(args.model_path)
        warm_up = traces.make_traces(4, WARM_UP_TOKENS, WARM_UP_TOKENS, seed=args.seed + 1, encode=encode)
        self.warm_up = [trace.ids for trace in warm_up]
        if not self.grid and not args.swing:
            return
        store = traces.TraceStore(args.traces, encode, seed=args.seed)
        most: dict[int, int] = {}
        for context, requests in self.grid:
            most[context] = max(most.get(context, 0), requests)
        if args.swing:
            most[args.swing_context] = max(most.get(args.swing_context, 0), args.swing[1])
        facts = {}
        for context, count in most.items():
            self.prompts[context] = store.get(count, context, args.max_new_tokens)
            shared = traces.shared_prefix(self.prompts[context])
            families = Counter(trace.family for trace in self.prompts[context])
            facts[str(context)] = {"families": dict(families), "longest_shared_prefix": shared}
        self.file.run["prompts"] = {"source": traces.__doc__, "by_context": facts}
        self.file.save()

    def _late(self) -> bool:
        return time.monotonic() - self.began > self.args.time_limit

    def _note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _serve(self, algorithm: str) -> None:
        args, flags = self.args, server_flags(algorithm, self.args, self.device)
        self.progress.update(self.task, description=f"{algorithm}: starting the server")
        facts = self.file.run["servers"][algorithm] = {"flags": flags, "status": "failed"}
        server = ServerProcess(
            args.model_path,
            flags,
            env=server_env(args, self.device),
            log_path=args.out.with_suffix(f".{algorithm}.log"),
            timeout_s=args.start_timeout,
        )
        began = time.monotonic()
        try:
            with server:
                facts |= {"status": "ok", "up_s": round(time.monotonic() - began, 1)}
                info = asyncio.run(cells.get_info(server.url))
                facts |= capacity_of(info)
                self._note(f"{algorithm}: up after {facts['up_s']:.0f} s, "
                           f"KV pool {facts['kv_capacity']} tokens")  # fmt: skip
                # What is compiled or loaded at its first use must not be in the first cell.
                warm_up = cells.run_streams(
                    server.url, self.warm_up, new_tokens=64, lead=0, timeout_s=args.cell_timeout
                )
                asyncio.run(warm_up)
                self._measure(algorithm, server, facts)
                facts["sparsespec"] = sparsespec_of(asyncio.run(cells.get_info(server.url))) or None
        except (ServerError, cells.CellError, aiohttp.ClientError, TimeoutError) as error:
            facts |= {"status": "failed", "reason": str(error) or type(error).__name__}
            self.failed = True
            self._note(f"{algorithm}: {facts['reason']}")
        self.file.save()

    def _measure(self, algorithm: str, server: ServerProcess, facts: dict[str, Any]) -> None:
        for context, requests in self.grid:
            at = {"algorithm": algorithm, "context": context, "concurrency": requests}
            self.progress.update(self.task, description=f"{algorithm}: {requests} x {context}")
            self._finish("cells", at | self._cell(algorithm, server.url, context, requests, facts))
        if self.args.swing:
            self.progress.update(self.task, description=f"{algorithm}: a load that swings")
            self._finish("swings", {"algorithm": algorithm} | self._swing(server.url))
        if self.args.problems:
            self.progress.update(self.task, description=f"{algorithm}: {self.args.prompts.name}")
            self._finish("prompt_runs", {"algorithm": algorithm} | self._run_prompts(server.url))

    def _finish(self, kind: str, entry: dict[str, Any]) -> None:
        self.file.add(kind, entry)
        self.failed |= entry["status"] in ("failed", "skipped")
        self._note(line_of(entry))
        self.progress.advance(self.task)

    def _cell(
        self, algorithm: str, url: str, context: int, requests: int, facts: dict[str, Any]
    ) -> dict[str, Any]:
        args, lead = self.args, self.args.lead
        entry = {"new_tokens": args.max_new_tokens, "lead": lead}
        if self._late():
            return entry | {"status": "skipped", "reason": "--time-limit is over."}
        capacity, most = facts["kv_capacity"], facts["max_requests"]
        entry["kv_share_needed"] = round(
            cells.tokens_needed(requests, context, args.max_new_tokens) / capacity, 4
        )
        try:
            cells.check_fit(requests, context, args.max_new_tokens, capacity=capacity, max_requests=most)
            prompts = [trace.ids[: context - lead] for trace in self.prompts[context][:requests]]
            measured, ids = asyncio.run(self._streams(algorithm, url, prompts))
        except cells.DoesNotFitError as error:
            return entry | {"status": "does not fit", "reason": str(error)}
        except (cells.CellError, aiohttp.ClientError, TimeoutError) as error:
            return entry | {"status": "failed", "reason": str(error) or type(error).__name__}
        if algorithm == "plain":
            self.plain_ids[context, requests] = ids
        elif plain := self.plain_ids.get((context, requests)):
            measured["equal_to_plain"] = sum(a == b for a, b in zip(ids, plain, strict=True))
        return entry | {"status": "ok"} | measured

    async def _streams(
        self, algorithm: str, url: str, prompts: list[list[int]]
    ) -> tuple[dict[str, Any], list[list[int]]]:
        args = self.args
        if algorithm == "ngram":
            await cells.flush(url)
        before = sparsespec_of(await cells.get_info(url))
        began = time.monotonic()
        streams, load = await cells.run_streams(
            url,
            prompts,
            new_tokens=args.max_new_tokens + args.lead,
            lead=args.lead,
            timeout_s=args.cell_timeout,
        )
        window = cells.measure(streams, args.lead)
        first = max(stream.times[0] for stream in streams)
        entry = {
            "tokens_per_s": round(window.tokens_per_s, 2),
            "step_ms": round(window.step_ms, 3),
            "acceptance_length": window.acceptance_length and round(window.acceptance_length, 3),
            "window_s": round(window.seconds, 3),
            "window_tokens": round(window.tokens),
            "prefill_s": round(first - began, 3),
            "cached_tokens": sum(stream.cached_tokens for stream in streams),
            "kv_usage": load.get("token_usage"),
            "running": load.get("num_running_reqs"),
        }
        after = sparsespec_of(await cells.get_info(url))
        return entry | rounds_between(before, after), [stream.ids for stream in streams]

    def _swing(self, url: str) -> dict[str, Any]:
        args, (few, many) = self.args, self.args.swing
        entry = {"context": args.swing_context, "concurrency": many, "few_requests": few,
                 "period_s": args.swing_period}  # fmt: skip
        if self._late():
            return entry | {"status": "skipped", "reason": "--time-limit is over."}
        prompts = [trace.ids for trace in self.prompts[args.swing_context][:many]]
        swing = Swing(url, prompts, few=few, period=args.swing_period, seconds=args.swing_seconds)
        before = sparsespec_of(asyncio.run(cells.get_info(url)))
        try:
            entry |= {"status": "ok"} | figures(asyncio.run(swing.run()), args.swing_period)
            return entry | rounds_between(before, sparsespec_of(asyncio.run(cells.get_info(url))))
        except (cells.CellError, aiohttp.ClientError, TimeoutError) as error:
            return entry | {"status": "failed", "reason": str(error) or type(error).__name__}

    def _run_prompts(self, url: str) -> dict[str, Any]:
        args = self.args
        entry = {"prompts": args.prompts.name, "concurrency": args.concurrency_run}
        if self._late():
            return entry | {"status": "skipped", "reason": "--time-limit is over."}
        try:
            asyncio.run(cells.flush(url))
            entry |= run_prompts(
                url,
                args.model_path,
                args.problems,
                concurrency=args.concurrency_run,
                max_tokens=args.max_answer_tokens,
                timeout_s=args.run_timeout,
                progress=self.progress,
            )
            offload = sparsespec_of(asyncio.run(cells.get_info(url))).get("offload")
            return entry | ({"offload": offload} if offload else {})
        except (cells.CellError, aiohttp.ClientError, TimeoutError) as error:
            return entry | {"status": "failed", "reason": str(error) or type(error).__name__}


def capacity_of(info: dict[str, Any]) -> dict[str, Any]:
    """KV tokens and requests that a server holds at a time, and the command it was asked for."""
    state = info["internal_states"][0]
    return {
        "kv_capacity": int(info["max_total_num_tokens"]),
        "max_requests": int(state["effective_max_running_requests_per_dp"]),
        "memory_usage": state.get("memory_usage"),
        "attention_backend": info.get("attention_backend"),
        "launch_command": info.get("launch_command"),
    }


def sparsespec_of(info: dict[str, Any]) -> dict[str, Any]:
    """What the server reports of SPARSESPEC; {} without it."""
    return info["internal_states"][0].get("sparsespec") or {}


def rounds_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the server counted from one state to a later one; {} where it did not speculate.

    `rounds_by_drafts` holds plain steps too, as those of 0 drafts.
    """
    drafts, was = after.get("rounds_by_drafts", {}), before.get("rounds_by_drafts", {})
    chosen = {n: count - was.get(n, 0) for n, count in drafts.items() if count > was.get(n, 0)}
    found: dict[str, Any] = {"rounds_by_drafts": chosen} if chosen else {}
    for name in ("rounds", "unified_rounds", "eager_micro_steps"):
        if many := after.get(name, 0) - before.get(name, 0):
            found[name] = many
    verifications = after.get("verifications", 0) - before.get("verifications", 0)
    if verifications > 0:
        accepted = sum(after.get(n, 0) - before.get(n, 0) for n in ("accepted_tokens", "looked_up_tokens"))
        found["server_acceptance_length"] = round(1 + accepted / verifications, 3)
    return found


def line_of(entry: dict[str, Any]) -> str:
    """One line for the console."""
    what = entry["prompts"] if "prompts" in entry else f"{entry['concurrency']:4d} x {entry['context']}"
    line = f"{entry['algorithm']:10} {what:14} {entry['status']}"
    if entry["status"] != "ok":
        return f"{line}: {entry['reason']}"
    line += f" {entry['tokens_per_s']:9.1f} tokens/s"
    if "few_requests" in entry:
        line += f"  {entry['few']:.1f} with {entry['few_requests']} requests, {entry['many']:.1f} with all"
    if "step_ms" in entry:
        line += f"  step {entry['step_ms']:7.2f} ms, prefill {entry['prefill_s']:.1f} s"
    if entry.get("acceptance_length"):
        line += f", acceptance length {entry['acceptance_length']:.2f}"
    if "right" in entry:
        line += f"  {entry['right']} of {entry['problems']} right"
    if "equal_to_plain" in entry:
        line += f", {entry['equal_to_plain']} of {entry['concurrency']} as plain"
    return line


def _terminated(number: int, frame: object) -> NoReturn:
    # Raised in the main thread, so the `with` blocks end the servers.
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    console, errors = Console(), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        args = parse_args(argv, __doc__)
        with Progress(*columns, console=console) as progress:
            sweep = Sweep(args, console, progress)
            status = sweep.run()
        console.print(text_table([sweep.file.run]), markup=False, highlight=False, soft_wrap=True)
        return status
    except (UsageError, PromptsError, ConfigError, traces.TraceError, results.ResultsError) as error:
        errors.print(str(error), markup=False)
        return 2
    except OSError as error:
        errors.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("Stopped; the servers are ended, and what was measured is in the results file.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
