"""Options of the sweep, and the flags of its servers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import traces
from sglang_sparsespec._client import load_problems
from sglang_sparsespec.config import CONFIG_ENV, parse_config_text, resolve_config

# The paper's ablation (SparseSpec, arXiv 2512.01278) and, on top of it, rounds chosen by measured times:
# SPARSESPEC with these keys over --sparsespec-config, and with these flags.
ABLATION: dict[str, tuple[dict[str, str], list[str]]] = {
    "naive": ({"schedule": "lockstep", "adapt": "off"}, ["--disable-overlap-schedule"]),
    "unified": ({"schedule": "unified", "adapt": "off"}, ["--disable-overlap-schedule"]),
    "delayed": ({"schedule": "unified", "adapt": "off"}, []),
    "adaptive": ({"schedule": "auto", "adapt": "on"}, []),
}
ALGORITHMS = ("plain", "sparsespec", "ngram", *ABLATION)
RESERVED = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--speculative-algorithm",
    "--sparsespec-config",
    "--incremental-streaming-output",
)


class UsageError(ValueError):
    """An option that cannot be used. The text names it, what was given and what to do."""


def parse_args(argv: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Parse and check the options. Raises UsageError, PromptsError or ConfigError for what cannot be used."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", "--model", required=True, help="model folder or name, the same for all servers")
    add(
        "--algorithms",
        default="plain,sparsespec,ngram",
        help=f"which, in this order, of {', '.join(ALGORITHMS)} (default plain,sparsespec,ngram)",
    )
    add(
        "--seed", type=int, default=1, help="of the prompts and, as --random-seed, of the servers (default 1)"
    )
    add("--server-flags", default="", help="more of every server: --server-flags='--tp-size 2'")
    add(
        "--sparsespec-config",
        metavar="JSON",
        help="of the SPARSESPEC servers: JSON or the path of a JSON file",
    )
    add("--ngram-flags", default="", help="more flags of the NGRAM server (default: SGLang's own defaults)")
    add("--out", type=Path, required=True, help="JSON file; an existing one gets one more run")
    add("--context", type=_positive, nargs="*", default=[8192], help="L, tokens of a prompt; empty: no cells")
    add("--concurrency", type=_positive, nargs="+", default=[1, 16, 48], help="N, requests of a cell")
    add("--max-new-tokens", type=_positive, default=256, help="M, tokens measured at most (default 256)")
    add(
        "--cells",
        type=_cell,
        nargs="*",
        default=[],
        metavar="NxL",
        help="cells besides --context times --concurrency, such as 8x4096 for 8 requests of 4096 tokens",
    )
    add(
        "--lead",
        type=_natural,
        default=0,
        help="tokens decoded before the clock starts, within L (default 0)",
    )
    add("--traces", type=Path, help="JSON file that keeps the prompts; made when missing")
    add("--prompts", type=Path, help="also answer this prompts file from start to end")
    add("--concurrency-run", type=_positive, default=34, help="problems answered at a time (default 34)")
    add("--max-answer-tokens", type=_positive, default=16384, help="longest answer (default 16384)")
    add(
        "--swing",
        type=_positive,
        nargs=2,
        metavar=("FEW", "MANY"),
        help="also a load that swings between so many requests",
    )
    add("--swing-context", type=_positive, default=8192, help="tokens of its prompts (default 8192)")
    add("--swing-period", type=float, default=5.0, help="seconds between two swings (default 5)")
    add("--swing-seconds", type=float, default=120.0, help="seconds it lasts (default 120)")
    add("--start-timeout", type=_positive, default=900, help="seconds until a server must be ready")
    add("--cell-timeout", type=_positive, default=300, help="seconds for one cell, prefill included")
    add("--run-timeout", type=_positive, default=900, help="seconds for one run of the prompts file")
    add("--time-limit", type=_positive, default=7200, help="seconds after which nothing new is started")
    return check_args(parser.parse_args(argv))


def check_args(args: argparse.Namespace) -> argparse.Namespace:
    """Resolve lists and refuse what cannot be used, before a server is started."""
    args.algorithms = [name for name in args.algorithms.split(",") if name]
    if unknown := [name for name in args.algorithms if name not in ALGORITHMS]:
        raise UsageError(f"--algorithms: unknown {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}.")
    args.server_flags = _words("--server-flags", args.server_flags)
    args.ngram_flags = _words("--ngram-flags", args.ngram_flags)
    for flag in [*args.server_flags, *args.ngram_flags]:
        if flag.split("=")[0] in RESERVED:
            raise UsageError(f"{flag.split('=')[0]} is set by the sweep itself; leave it out of the flags.")
    args.context, args.concurrency = sorted(set(args.context)), sorted(set(args.concurrency))
    grid = grid_of(args)
    if grid and grid[0][0] <= traces.CHAIN_TOKENS + args.lead:
        raise UsageError(f"--context, --cells: {grid[0][0]} tokens given; a prompt needs more than "
                         f"{traces.CHAIN_TOKENS} and --lead.")  # fmt: skip
    if args.swing:
        _check_swing(args)
    if not grid and args.prompts is None and not args.swing:
        raise UsageError(
            "nothing to measure: give --context, --cells, --prompts, --swing, or several of them."
        )
    args.problems = load_problems(args.prompts) if args.prompts else []
    for algorithm in args.algorithms:
        text = sparsespec_config(algorithm, args)
        resolve_config(environ={**os.environ, CONFIG_ENV: text} if text else None)
    return args


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option}: {text!r} is no list of words ({error}); quote it as for a shell."
        ) from None


def grid_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Context and requests of every cell, in the order in which they are measured."""
    product = {(context, requests) for context in args.context for requests in args.concurrency}
    return sorted(product.union(args.cells))


def _check_swing(args: argparse.Namespace) -> None:
    few, many = args.swing
    if few >= many:
        raise UsageError(f"--swing is {few} and {many}: give fewer and more requests, in this order.")
    if args.swing_context <= traces.CHAIN_TOKENS:
        raise UsageError(f"--swing-context: needs more than {traces.CHAIN_TOKENS} tokens.")
    if not args.swing_period > 0 or not args.swing_seconds >= 2 * args.swing_period:
        raise UsageError("--swing-seconds must hold two periods at least, and --swing-period be above 0.")


def sparsespec_config(algorithm: str, args: argparse.Namespace) -> str | None:
    """The JSON, or the path of it, that a SPARSESPEC server is given; None for none."""
    if algorithm in ABLATION:
        given = parse_config_text(args.sparsespec_config or "", source="--sparsespec-config")
        return json.dumps({**given, **ABLATION[algorithm][0]})
    return args.sparsespec_config if algorithm == "sparsespec" else None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 up, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _cell(text: str) -> tuple[int, int]:
    requests, _, context = text.partition("x")
    if not (requests.isdecimal() and context.isdecimal() and int(requests) and int(context)):
        raise argparse.ArgumentTypeError(f"needs requests x tokens of context, such as 8x4096, got {text!r}")
    return int(context), int(requests)


def server_flags(algorithm: str, args: argparse.Namespace, device: str) -> list[str]:
    """The flags of one server. Servers differ in nothing but the speculation."""
    flags = list(args.server_flags)
    given = {flag.split("=")[0] for flag in flags}
    runs = [args.concurrency_run] if args.prompts else []
    most = max([*(requests for _, requests in grid_of(args)), *runs, *(args.swing or [])])
    # NGRAM would set 48 by itself, and then another graph would serve the same batch.
    defaults = {"--max-running-requests": str(most), "--random-seed": str(args.seed)}
    if device == "cpu":
        defaults["--dtype"] = "float32"
    flags += [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
    if algorithm == "sparsespec" or algorithm in ABLATION:
        config = sparsespec_config(algorithm, args)
        flags += ["--speculative-algorithm", "SPARSESPEC"]
        flags += ["--sparsespec-config", config] if config else []
        flags += ABLATION[algorithm][1] if algorithm in ABLATION else []
    elif algorithm == "ngram":
        flags += ["--speculative-algorithm", "NGRAM", *args.ngram_flags]
    return flags


def server_env(args: argparse.Namespace, device: str) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1"} if Path(args.model_path).is_dir() else {}
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"
    return env
