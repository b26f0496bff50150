"""`python -m sglang_sparsespec.demo`: the same problems with and without SPARSESPEC, on this machine.

Starts a server with `--speculative-algorithm SPARSESPEC` and then one without, sends both the same problems
at temperature 0, and compares answers, texts, acceptance and speed. Needs no network: model and problems are
in the package. Exit status: 0 when all went as it must, 1 when not, 2 for wrong usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sglang_sparsespec._client import (
    Outcome,
    Problem,
    PromptsError,
    answer_all,
    encode_prompts,
    load_problems,
)
from sglang_sparsespec._demo_report import (
    Run,
    faults,
    identical,
    mark,
    progress_table,
    result_table,
    show_texts,
)
from sglang_sparsespec._server import ServerError, ServerProcess
from sglang_sparsespec.config import CONFIG_ENV, ConfigError, resolve_config

ASSETS = Path(__file__).parent / "assets"
BUNDLED_MODEL = ASSETS / "reasoner-5m"
BUNDLED_PROMPTS = ASSETS / "demo-prompts.jsonl"
NEAR_TIES = (
    "In float32 this must not happen. In bfloat16 it can: batches of another shape round differently, and "
    "two almost equally likely tokens may swap, with or without speculation."
)


class UsageError(ValueError):
    """An option that cannot be used. The text names it, what was given and what to do."""


def run_problems(
    console: Console,
    label: str,
    url: str,
    problems: Sequence[Problem],
    ids: list[list[int]],
    args: argparse.Namespace,
) -> Run:
    """Answer all problems on the server at `url`, with a live table on a terminal and lines elsewhere."""
    outcomes = [Outcome(problem) for problem in problems]

    def run(on_change: Callable[[Outcome], None]) -> Run:
        seconds = asyncio.run(
            answer_all(
                url,
                ids,
                outcomes,
                max_tokens=args.max_tokens,
                concurrency=args.concurrency,
                on_change=on_change,
            )
        )
        return Run(label, outcomes, seconds)

    if console.is_terminal:
        table: Callable[[], Table] = lambda: progress_table(label, outcomes)  # noqa: E731
        with Live(console=console, get_renderable=table, refresh_per_second=4):
            return run(lambda outcome: None)

    def line(outcome: Outcome) -> None:
        if outcome.state in ("done", "failed"):
            done = sum(out.state in ("done", "failed") for out in outcomes)
            cost = f"{outcome.tokens:6d} tokens {outcome.rate:7.1f} tokens/s"
            console.print(
                f"{done:3d}/{len(outcomes)} {outcome.problem.family:8} {cost}  {mark(outcome)}", markup=False
            )

    return run(line)


def serve_and_run(
    console: Console,
    label: str,
    server: ServerProcess,
    problems: Sequence[Problem],
    ids: list[list[int]],
    args: argparse.Namespace,
) -> Run:
    console.print(f"Starting a server: {label} ...", markup=False)
    with server:
        return run_problems(console, label, server.url, problems, ids, args)


def make_server(args: argparse.Namespace, device: str, *, speculative: bool) -> ServerProcess:
    """The server of one run, not started. Both runs differ in nothing but the speculation."""
    server_args, env = list(args.server_arg), {}
    if device == "cpu":
        env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        if not any(arg.split("=")[0] == "--dtype" for arg in server_args):
            server_args += ["--dtype", "float32"]
    if Path(args.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if speculative:
        server_args += ["--speculative-algorithm", "SPARSESPEC"]
        if args.k is not None:
            server_args += ["--speculative-num-steps", str(args.k)]
        if args.config is not None:
            env[CONFIG_ENV] = args.config
        elif CONFIG_ENV not in os.environ:
            # Where rounds adapt, few short problems may be decoded plainly: there would be no drafts to see.
            env[CONFIG_ENV] = '{"adapt": "off"}'
    log = args.log_dir / f"server-{'sparsespec' if speculative else 'plain'}.log" if args.log_dir else None
    return ServerProcess(args.model_path, server_args, env=env, log_path=log, timeout_s=args.timeout)


def find_device() -> str:
    import torch  # seconds to import: not at the top

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the options. Raises UsageError, PromptsError or ConfigError for what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_sparsespec.demo", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    add = parser.add_argument
    add(
        "--model-path",
        default=str(BUNDLED_MODEL),
        help="model folder or name (default: the bundled 5M reasoner)",
    )
    add("--prompts", type=Path, help='JSON lines with "prompt" and, if known, "answer" and "family"')
    add("--max-tokens", type=_positive, default=2048, help="longest answer, in tokens (default 2048)")
    add("--concurrency", type=_positive, default=4, help="problems answered at a time (default 4)")
    add("--k", type=int, help="drafts per round (default: the server's)")
    add(
        "--config",
        metavar="JSON",
        help=f"what {CONFIG_ENV} shall hold: JSON or the path of a JSON file (default: adapt off)",
    )
    add("--no-baseline", action="store_true", help="leave out the run without speculation")
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="more arguments for both servers, repeatable: --server-arg='--tp-size 2'",
    )
    add("--timeout", type=_positive, default=600, help="seconds until a server must be ready (default 600)")
    add("--log-dir", type=Path, help="keep the servers' logs in this folder")
    add("--json", type=Path, metavar="OUT", help="write all figures and texts to this file")
    args = parser.parse_args(argv)
    args.server_arg = [part for arg in args.server_arg for part in shlex.split(arg)]
    _check_paths(args)
    resolve_config(
        num_steps=args.k, environ={**os.environ, CONFIG_ENV: args.config} if args.config is not None else None
    )
    args.problems = load_problems(args.prompts or BUNDLED_PROMPTS)
    return args


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 up, got {text!r}")
    return int(text)


def _check_paths(args: argparse.Namespace) -> None:
    model = Path(args.model_path)
    if model.is_dir() and not (model / "config.json").is_file():
        raise UsageError(
            f"--model-path: the folder {args.model_path!r} holds no config.json, so it is no model."
        )
    if not model.exists() and args.model_path.startswith(("/", ".", "~")):
        raise UsageError(
            f"--model-path: there is no folder {args.model_path!r}. Give a model folder or name."
        )
    if args.log_dir:
        args.log_dir.mkdir(parents=True, exist_ok=True)
    if args.json and not args.json.absolute().parent.is_dir():
        raise UsageError(
            f"--json: the folder of {str(args.json)!r} does not exist. Make it, or name another file."
        )
    reserved = {
        "--model-path",
        "--model",
        "--host",
        "--port",
        "--speculative-algorithm",
        "--incremental-streaming-output",
    }
    for arg in args.server_arg:
        if arg.split("=")[0] in reserved:
            raise UsageError(f"--server-arg: {arg.split('=')[0]} is set by the demo itself; leave it out.")


def demo(args: argparse.Namespace, console: Console) -> int:
    """Run both servers one after the other, print and write the result; returns the exit status."""
    device = find_device()
    ids = encode_prompts(args.problems, args.model_path)
    console.print(
        f"{len(ids)} problems, {args.concurrency} at a time, model {args.model_path}, on {device}.",
        soft_wrap=True,
    )
    spec = serve_and_run(
        console, "SPARSESPEC", make_server(args, device, speculative=True), args.problems, ids, args
    )
    show_texts(console, spec.outcomes)
    plain = None
    if not args.no_baseline:
        server = make_server(args, device, speculative=False)
        plain = serve_and_run(console, "without speculation", server, args.problems, ids, args)
    console.print(result_table(spec, plain))
    if device == "cpu":
        console.print(
            "Speed on a CPU is not the point: this run shows that SPARSESPEC changes no text, and how many "
            "tokens one full-attention forward yields. What that gains shows on a GPU, with long contexts."
        )
    if plain and not all(identical(spec, plain)):
        console.print(f"Some texts differ. {NEAR_TIES}")
    found = faults(
        spec,
        plain,
        bundled_prompts=args.prompts is None,
        bundled_model=Path(args.model_path) == BUNDLED_MODEL,
    )
    for fault in found:
        console.print(fault, style="red", markup=False)
    if args.json:
        write_json(args.json, args, device, spec, plain, found)
    return 1 if found else 0


def write_json(
    path: Path, args: argparse.Namespace, device: str, spec: Run, plain: Run | None, found: list[str]
) -> None:
    report = {
        "model_path": args.model_path,
        "device": device,
        "speculation": spec.asdict(),
        "baseline": plain.asdict() if plain else None,
        "identical": sum(identical(spec, plain)) if plain else None,
        "faults": found,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _terminated(number: int, frame: object) -> NoReturn:
    # Raised in the main thread, so the `with` blocks end the servers.
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    console, errors = Console(), Console(stderr=True)
    try:
        return demo(parse_args(argv), console)
    except (UsageError, PromptsError, ConfigError) as error:
        errors.print(str(error), markup=False)
        return 2
    except (ServerError, OSError) as error:
        errors.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("Stopped; the servers are ended.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
