"""Every kernel on one GPU against its roofline and its alternatives.

    python benchmark/kernels/bench.py --out kernels.json --png kernels.png

Bandwidth of the card first; then attention of verify and draft rows (FA3, FlashInfer, ours), scores,
selection, the small kernels of a round, and the products of a layer's weights with draft rows. Times come
from CUDA graphs of ten launches, median of 20 replays; launches take turns among slots of a 4 GiB KV pool.
Results are checked before they are timed. What is not installed is skipped, and the reason is shown. Needs
torch; sgl-kernel, flashinfer and triton are optional.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention import Case, NotHereError, draft_cases, verify_cases
from kernel_report import draw, line_of, text_table
from products import product_cases
from rows import POOL_SLOTS, KvPool, make_rows
from selection import round_cases, score_cases, select_cases
from shapes import DRAFT, SMOKE_DRAFT, SMOKE_VERIFY, VERIFY, draft_name
from timing import bandwidth, time_us

ROOT = Path(__file__).parents[2]
GROUPS = ("verify", "draft", "score", "select", "round", "product")


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """All cases in order. Rows are made here, once a shape; all else when a case is prepared."""
    verify, draft = (SMOKE_VERIFY, SMOKE_DRAFT) if args.smoke else (VERIFY, DRAFT)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    slots = 2048 if args.smoke else POOL_SLOTS
    pool = KvPool(slots, verify[0].kv_heads, verify[0].dim, device, dtype)
    for shape in verify if {"verify", "score"} & set(args.only) else ():
        rows = make_rows(shape, pool)
        yield from verify_cases(rows) if "verify" in args.only else ()
        yield from score_cases(rows) if "score" in args.only else ()
    for shape in draft if "draft" in args.only else ():
        yield from draft_cases(make_rows(shape, pool), draft_name(shape))
    layers = {"layers": 2} if args.smoke else {}
    for shape in verify if "select" in args.only else ():
        yield from select_cases(shape, device, **layers)
    for shape in verify[:1] if "round" in args.only else ():
        yield from round_cases(shape, device, **layers)
    if "product" in args.only:
        yield from product_cases(device, smoke=args.smoke)


def time_case(case: Case, device: torch.device, read: float) -> dict[str, Any]:
    """Figures of one case; `status` is ok, skipped (not installed) or failed, with a `reason`."""
    entry = {"group": case.group, "shape": case.shape, "kernel": case.kernel, "bytes": case.bytes}
    try:
        us = time_us(case.make(), device)
    except (ImportError, NotHereError) as error:
        return entry | {"status": "skipped", "reason": first_line(error)}
    except Exception as error:  # a kernel that fails must not end the others' measurement
        return entry | {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
    speed = case.bytes / (us * 1e-6)
    figures = {"us": round(us, 2), "roofline_us": round(case.bytes / read * 1e6, 2)}
    if case.bytes:
        figures |= {"tb_per_s": round(speed / 1e12, 3), "percent_of_read": round(100 * speed / read, 1)}
    return entry | {"status": "ok"} | figures


def first_line(error: Exception) -> str:
    """The first line of an error's text that is not empty, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


def progress(show: bool) -> Any:
    """A rich progress display, or None where rich is not installed or the output is no terminal."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    if not show:
        return None
    text = TextColumn("{task.description}")
    return Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure all cases; the JSON file is written after each."""
    sys.path.append(str(ROOT / "benchmark" / "serving"))
    from results import header

    began = time.monotonic()
    report: dict[str, Any] = {"format": 1, **header(), "bandwidth": bandwidth(device), "results": []}
    print("bandwidth: " + ", ".join(f"{k} {v / 1e12:.2f} TB/s" for k, v in report["bandwidth"].items()))
    bar = progress(sys.stdout.isatty())
    with bar or contextlib.nullcontext():
        wanted = [case for case in cases(args, device) if not skipped(case, args.skip)]
        task = bar.add_task("", total=len(wanted)) if bar else None
        for case in wanted:
            if bar:
                bar.update(task, description=f"{case.group} {case.shape}: {case.kernel}")
            if time.monotonic() - began > args.time_limit:
                entry = {"group": case.group, "shape": case.shape, "kernel": case.kernel, "bytes": case.bytes}
                entry |= {"status": "skipped", "reason": "--time-limit is over"}
            else:
                entry = time_case(case, device, report["bandwidth"]["read"])
            report["results"].append(entry)
            if bar:
                bar.console.print(line_of(entry), markup=False, highlight=False, soft_wrap=True)
                bar.advance(task)
            else:
                print(line_of(entry), flush=True)
            report["seconds"] = round(time.monotonic() - began, 1)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def skipped(case: Case, names: Sequence[str]) -> bool:
    """Whether the case's kernel begins with one of the names, in any letter case."""
    return any(case.kernel.lower().startswith(name.lower()) for name in names)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("kernels.json"), help="JSON file (default kernels.json)")
    add("--png", type=Path, help="write the plot to this file; needs matplotlib")
    add("--markdown", type=Path, help="write the table to this file")
    add("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups to measure (default: all)")
    add("--skip", nargs="+", default=[], metavar="KERNEL", help="leave out kernels whose names begin so")
    add("--time-limit", type=float, default=300, help="seconds after which no case is started (default 300)")
    add("--smoke", action="store_true", help="tiny shapes, on a CPU too: the times mean nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if not torch.cuda.is_available() and not args.smoke:
        print("This needs a CUDA device, and there is none. To try the script: --smoke.", file=sys.stderr)
        return 2
    sys.path.append(str(ROOT / "sgl-kernel-ext"))  # an installed package wins
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    report = run(args, device)
    print()
    print(text_table(report))
    if args.markdown:
        args.markdown.write_text(text_table(report, markdown=True) + "\n", encoding="utf-8")
    if args.png:
        draw(report, args.png)
    return 1 if any(entry["status"] == "failed" for entry in report["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
