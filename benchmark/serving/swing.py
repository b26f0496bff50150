"""A load that swings between few and many requests: what does changing the number of drafts cost?

    cd benchmark/serving
    python swing.py --model-path DIR --out swing.json --few 2 --many 48 --period 5 --seconds 120

Servers as in sweep.py (--algorithms, default plain,sparsespec,adaptive). `few` requests decode all the time;
in every second period there are `many`, which the client aborts at the period's end. The prompts are in the
radix cache before the clock starts, so that hardly any prefill is in the figures. Tokens/s of all requests
together, over all periods and over those of each kind; the better of the servers that never change, for each
kind of period, is what one that changes is measured against.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import cell as cells
import results
import traces
from sglang_sparsespec._client import parse_event
from sglang_sparsespec._server import ServerError, ServerProcess
from sglang_sparsespec.config import ConfigError
from sglang_sparsespec.demo import find_device
from sweep_options import UsageError, add_server_options, check_args, server_env, server_flags

NEW_TOKENS = 4096  # of a request; whoever finishes starts again


class Swing:
    """One server's run: workers that ask for the same prompts again and again; tokens of each period."""

    def __init__(self, url: str, prompts: Sequence[list[int]], args: argparse.Namespace) -> None:
        self.url, self.prompts, self.args = url, prompts, args
        self.tokens = [0] * max(1, round(args.seconds / args.period))
        self._began = 0.0

    async def run(self) -> list[int]:
        """Tokens of each period; the even ones have few requests."""
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._ask(session, ids, new_tokens=1) for ids in self.prompts))
            self._began = time.monotonic()
            few = [asyncio.create_task(self._work(session, ids)) for ids in self.prompts[: self.args.few]]
            try:
                for period in range(len(self.tokens)):
                    rest = self.prompts[self.args.few :] if period % 2 else []
                    more = [asyncio.create_task(self._work(session, ids)) for ids in rest]
                    await asyncio.sleep(
                        max(0.0, self._began + (period + 1) * self.args.period - time.monotonic())
                    )
                    await _end([*more, *(task for task in few if task.done())])
            finally:
                await _end(few)
        return self.tokens

    async def _work(self, session: aiohttp.ClientSession, ids: list[int]) -> None:
        while True:
            await self._ask(session, ids, new_tokens=NEW_TOKENS)

    async def _ask(self, session: aiohttp.ClientSession, ids: list[int], *, new_tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, "stream_interval": 4}
        body, seen = {"input_ids": ids, "sampling_params": sampling, "stream": True}, 0
        async with session.post(f"{self.url}/generate", json=body) as reply:
            if reply.status != 200:
                raise cells.CellError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if event := parse_event(line):
                    now = event["meta_info"]["completion_tokens"]
                    self._count(now - seen)
                    seen = now

    def _count(self, tokens: int) -> None:
        at = int((time.monotonic() - self._began) / self.args.period) if self._began else -1
        if 0 <= at < len(self.tokens):
            self.tokens[at] += tokens


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel workers. Raises what one of them has failed with."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def figures(tokens: Sequence[int], period: float) -> dict[str, Any]:
    """Tokens/s over all periods, over those with few requests, and over those with many."""

    def speed(part: Sequence[int]) -> float:
        return round(sum(part) / (len(part) * period), 2) if part else 0.0

    return {
        "tokens_per_s": speed(tokens),
        "few": speed(tokens[::2]),
        "many": speed(tokens[1::2]),
        "periods": tokens,
    }


def share_of_the_better(run: dict[str, Any], fixed: Sequence[dict[str, Any]]) -> float | None:
    """Tokens of a run over those of the better fixed mode of each kind of period; None without any."""
    best = sum(max((other[kind] for other in fixed), default=0.0) for kind in ("few", "many"))
    return round((run["few"] + run["many"]) / best, 4) if best else None


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser, algorithms="plain,sparsespec,adaptive")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file")
    add("--context", type=int, default=8192, help="tokens of a prompt")
    add("--few", type=int, default=2, help="requests that decode all the time")
    add("--many", type=int, default=48, help="requests in every second period")
    add("--period", type=float, default=5.0, help="seconds")
    add("--seconds", type=float, default=120.0, help="of a server's run")
    args = parser.parse_args(argv)
    if not 0 < args.few < args.many:
        raise UsageError(f"--few is {args.few} and --many is {args.many}: give 0 < few < many.")
    if args.period <= 0 or args.seconds < 2 * args.period:
        raise UsageError("--seconds must hold two periods at least, and --period be above 0.")
    context = args.context
    args.context, args.concurrency, args.prompts, args.lead = [context], [args.many], None, 0
    return check_args(args)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse_args(argv)
        encode = traces.load_encoder(args.model_path)
        made = traces.make_traces(args.many, args.context[0], 256, seed=args.seed, encode=encode)
        prompts, device = [trace.ids for trace in made], find_device()
        report: dict[str, Any] = {**results.header(), "runs": {}}
        for algorithm in args.algorithms:
            flags = server_flags(algorithm, args, device)
            log = args.out.with_suffix(f".{algorithm}.log")
            with ServerProcess(args.model_path, flags, env=server_env(args, device), log_path=log) as server:
                run = figures(asyncio.run(Swing(server.url, prompts, args).run()), args.period)
                info = asyncio.run(cells.get_info(server.url))
            run |= {"flags": flags, "sparsespec": info["internal_states"][0].get("sparsespec")}
            report["runs"][algorithm] = run
            fixed = [other for name, other in report["runs"].items() if name != "adaptive"]
            if algorithm == "adaptive":
                run["of_the_better_fixed"] = share_of_the_better(run, fixed)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            shown = {
                key: run[key] for key in ("tokens_per_s", "few", "many", "of_the_better_fixed") if key in run
            }
            print(
                f"{algorithm:12} " + ", ".join(itertools.starmap("{} {}".format, shown.items())), flush=True
            )
    except (UsageError, ConfigError, ServerError, cells.CellError, traces.TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
