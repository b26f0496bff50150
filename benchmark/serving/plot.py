"""Tables and a plot of sweep results: speed-up against concurrency, one curve a context.

    python benchmark/serving/plot.py sweep.json [more.json] --png sweep.png --markdown sweep.md
    python benchmark/serving/plot.py ablation.json --steps-png ablation.png

Speed-up is against plain decoding of the same cell in the same run; where a run lacks it, of another given
run with the same model, machine and settings. The plots need matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
from swing import share_of_the_better

COLUMNS = {
    "algorithm": "algorithm",
    "context": "context",
    "concurrency": "requests",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "acceptance_length": "acceptance",
    "step_ms": "step ms",
    "kv_usage": "KV used",
    "equal_to_plain": "ids as plain",
}
RUN_COLUMNS = {
    "algorithm": "algorithm",
    "prompts": "prompts",
    "concurrency": "at a time",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "acceptance_length": "acceptance",
    "right": "right",
    "problems": "of",
}
SWING_COLUMNS = {
    "algorithm": "algorithm",
    "context": "context",
    "few_requests": "few requests",
    "concurrency": "many requests",
    "tokens_per_s": "tokens/s",
    "few": "with few",
    "many": "with many",
    "of_the_better": "of the better fixed",
}
DIGITS = {
    "tokens_per_s": ",.1f",
    "speedup": ".2f",
    "acceptance_length": ".2f",
    "step_ms": ".2f",
    "kv_usage": ".0%",
    "few": ",.1f",
    "many": ",.1f",
    "of_the_better": ".3f",
}
MARKS = {
    "sparsespec": "o-",
    "fixed": "o--",
    "ngram": "s--",
    "naive": "v:",
    "unified": "^-.",
    "delayed": "D--",
    "adaptive": "*-",
}


class PlotError(RuntimeError):
    """A plot that cannot be drawn here. The text says what is missing."""


def rows_of(runs: Sequence[dict[str, Any]], kind: str = "cells") -> list[dict[str, Any]]:
    """Entries of all runs with their `speedup`, None where no plain decoding of the same cell is known."""

    def cell(entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(entry.get(key) for key in ("context", "concurrency", "new_tokens", "lead", "prompts"))

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        return run.get("model"), str(run["machine"])

    plain: dict[tuple[Any, ...], float] = {}
    for number, run in enumerate(runs):
        for entry in run.get(kind, ()):
            if entry["algorithm"] == "plain" and entry["status"] == "ok":
                plain[number, *cell(entry)] = entry["tokens_per_s"]
                plain.setdefault((place(run), *cell(entry)), entry["tokens_per_s"])
    rows = []
    for number, run in enumerate(runs):
        for entry in run.get(kind, ()):
            base = plain.get((number, *cell(entry))) or plain.get((place(run), *cell(entry)))
            ok = entry["status"] == "ok" and base
            rows.append({**entry, "speedup": entry["tokens_per_s"] / base if ok else None})
    return rows


def swings_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loads that swung, each adaptive one with its share of the better of the others in all runs."""
    rows = rows_of(runs, "swings")
    fixed = [row for row in rows if row["algorithm"] != "adaptive" and row["status"] == "ok"]
    for row in rows:
        if row["algorithm"] == "adaptive" and row["status"] == "ok":
            row["of_the_better"] = share_of_the_better(row, fixed)
    return rows


def _cells(row: dict[str, Any], columns: dict[str, str]) -> list[str]:
    values = []
    for key in columns:
        value = row.get(key)
        if key == "tokens_per_s" and row["status"] != "ok":
            value = row["status"]
        values.append(
            ""
            if value is None
            else format(value, DIGITS.get(key, ""))
            if not isinstance(value, str)
            else value
        )
    return values


def text_table(runs: Sequence[dict[str, Any]], *, markdown: bool = False) -> str:
    """All cells, runs of prompts files and loads that swung, as text with aligned columns or as markdown."""
    kinds = (
        (rows_of(runs), COLUMNS),
        (rows_of(runs, "prompt_runs"), RUN_COLUMNS),
        (swings_of(runs), SWING_COLUMNS),
    )
    parts = [table_of(rows, columns, markdown=markdown) for rows, columns in kinds if rows]
    return "\n\n".join(parts)


def table_of(rows: Sequence[dict[str, Any]], columns: dict[str, str], *, markdown: bool = False) -> str:
    """The `columns` (key in a row to header) of the rows, as text with aligned columns or as markdown."""
    return aligned([list(columns.values()), *(_cells(row, columns) for row in rows)], markdown=markdown)


def aligned(lines: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """A header and the lines below it, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    if not markdown:
        return "\n".join("  ".join(line) for line in padded)
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    table = ["| " + " | ".join(line) + " |" for line in padded]
    return "\n".join([table[0], rule, *table[1:]])


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise PlotError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(figure: Any, axes: Any, runs: Sequence[dict[str, Any]], path: Path) -> None:
    gpus = {", ".join(run["machine"]["gpus"]) or run["machine"]["cpu"] for run in runs}
    axes.set_title(
        f"{', '.join(sorted({run['model'] for run in runs}))} on {'; '.join(sorted(gpus))}", fontsize=9
    )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("decode throughput / plain decoding")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the PNG plot. Raises PlotError where matplotlib is not installed."""
    pyplot = _pyplot()
    rows = [row for row in rows_of(runs) if row["speedup"] is not None]
    contexts = sorted({row["context"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for at, context in enumerate(contexts):
        for algorithm in MARKS:
            # Later runs replace earlier ones of the same cell.
            points = {r["concurrency"]: r["speedup"] for r in rows
                      if r["context"] == context and r["algorithm"] == algorithm}  # fmt: skip
            if points:
                x = sorted(points)
                axes.plot(x, [points[n] for n in x], MARKS[algorithm], color=f"C{at % 10}",
                          label=f"{algorithm}, context {context:,}")  # fmt: skip
    axes.axhline(1, color="black", linewidth=1, label="plain decoding")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("requests decoding together")
    _finish(figure, axes, runs, path)


def draw_steps(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG plot of an ablation: a group of bars for each cell, in it a bar for each server.

    Raises PlotError where matplotlib is not installed.
    """
    pyplot = _pyplot()
    bars = {(row["context"], row["concurrency"], row["algorithm"]): row["speedup"]
            for row in rows_of(runs) if row["speedup"] is not None}  # fmt: skip
    cells = sorted({(context, requests) for context, requests, _ in bars})
    names = [name for name in MARKS if any(name == algorithm for *_, algorithm in bars)]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    width = 0.8 / max(1, len(names))
    for at, name in enumerate(names):
        x = [group + (at - (len(names) - 1) / 2) * width for group in range(len(cells))]
        drawn = axes.bar(x, [bars.get((*cell, name), 0.0) for cell in cells], width, label=name)
        axes.bar_label(drawn, fmt="{:.2f}", fontsize=7)
    axes.axhline(1, color="black", linewidth=1, label="plain decoding")
    axes.set_xticks(range(len(cells)), [f"{requests} x {context:,}" for context, requests in cells])
    axes.set_xlabel("requests x context")
    _finish(figure, axes, runs, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="result files of sweep.py")
    parser.add_argument("--png", type=Path, help="write the plot to this file")
    parser.add_argument("--steps-png", type=Path, help="write a plot with a bar for each server to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    args = parser.parse_args(argv)
    try:
        runs = [run for path in args.files for run in results.read(path)["runs"]]
        print(text_table(runs))
        if args.markdown:
            args.markdown.write_text(text_table(runs, markdown=True) + "\n", encoding="utf-8")
        if args.png:
            draw(runs, args.png)
        if args.steps_png:
            draw_steps(runs, args.steps_png)
    except (results.ResultsError, PlotError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
