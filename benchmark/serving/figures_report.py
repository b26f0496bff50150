"""Tables, bars and plots of figures.py, from the results files that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plot
from figures_plan import DONE, STEPS, Cell, Entry, Runs, Scale, remaining

NEVER_BELOW = 0.97  # of plain decoding, in every cell
OF_THE_BETTER = 0.95  # of plain decoding and of rounds that never change, under a load that swings

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a bar is met; None: not everything that it needs was measured."""

    bar: str
    met: bool | None
    why: str

    def __str__(self) -> str:
        word = {True: "pass", False: "fail", None: "open"}[self.met]
        return f"{self.bar}: **{word}**. {self.why}"


def runs_of(files: Runs, *names: str) -> list[dict[str, Any]]:
    """Runs of these servers, in this order. Those of `fixed` are called so, not by sweep.py's algorithm."""

    def called(run: dict[str, Any], name: str) -> dict[str, Any]:
        if name != "fixed":
            return run
        kinds = ("cells", "swings", "prompt_runs")
        return run | {kind: [{**found, "algorithm": name} for found in run[kind]] for kind in kinds}

    return [called(run, name) for name in names for run in files.get(name, ())]


def latest(rows: Sequence[Row]) -> list[Row]:
    """One row of each algorithm and cell: the first that was measured, or else the last that was tried.

    The first, because `plot.rows_of` takes the first plain decoding for the base of other runs.
    """
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = row["algorithm"], row.get("context"), row["concurrency"]
        if key not in kept or kept[key]["status"] not in DONE:
            kept[key] = row
    return list(kept.values())


def by_cell(runs: Sequence[dict[str, Any]]) -> dict[Cell, dict[str, Row]]:
    """Rows by context and requests, then by algorithm."""
    found: dict[Cell, dict[str, Row]] = {}
    for row in latest(plot.rows_of(runs)):
        found.setdefault((row["context"], row["concurrency"]), {})[row["algorithm"]] = row
    return dict(sorted(found.items()))


def speeds(cells: dict[Cell, dict[str, Row]], algorithms: Sequence[str]) -> str:
    """A table of tokens/s by cell, and for all but plain decoding the ratio to it and acceptance lengths."""
    header = ["context", "requests"]
    for name in algorithms:
        header += [name] if name == "plain" else [name, "x plain", "acceptance"]
    lines = [header]
    for (context, requests), rows in cells.items():
        line = [f"{context:,}", str(requests)]
        for name in algorithms:
            row = rows.get(name, {})
            line.append(_number(row.get("tokens_per_s"), ",.1f") or row.get("status", ""))
            if name != "plain":
                line += [_number(row.get("speedup"), ".2f"), _number(row.get("acceptance_length"), ".2f")]
        lines.append(line)
    return plot.aligned(lines, markdown=True)


def never_below_plain(cells: dict[Cell, dict[str, Row]], wanted: Sequence[Cell]) -> Verdict:
    """The bar of the adaptive server over the `wanted` cells. Cells that fit neither server do not count."""
    bar = f"adaptive never below {NEVER_BELOW} x plain"
    ratios: dict[Cell, float] = {}
    open_cells, too_large = [], 0
    for cell in wanted:
        rows = cells.get(cell, {})
        states = [rows.get(name, {}).get("status") for name in ("plain", "adaptive")]
        if (ratio := rows.get("adaptive", {}).get("speedup")) is not None:
            ratios[cell] = ratio
        elif states == ["does not fit"] * 2:
            too_large += 1
        else:
            open_cells.append(cell)
    why = [f"{len(ratios)} of {len(wanted)} cells compared, {too_large} fit neither."]
    below = [cell for cell, ratio in ratios.items() if ratio < NEVER_BELOW]
    if ratios:
        lowest = min(ratios, key=lambda cell: ratios[cell])
        why.append(f"Lowest: {ratios[lowest]:.3f} at {_name(lowest)}.")
    if below:
        why.append("Below: " + ", ".join(f"{_name(cell)} ({ratios[cell]:.3f})" for cell in below) + ".")
    if open_cells:
        why.append("Not compared: " + ", ".join(map(_name, open_cells)) + ".")
    return Verdict(bar, False if below else None if open_cells or not ratios else True, " ".join(why))


def swing_bar(rows: Sequence[Row]) -> Verdict:
    """The bar of the adaptive server under a load that swings, by rows of `plot.swings_of`."""
    bar = f"swing of adaptive at least {OF_THE_BETTER} of the better of plain and fixed"
    ok = {row["algorithm"]: row for row in rows if row["status"] == "ok"}
    missing = [name for name in ("plain", "adaptive", "fixed") if name not in ok]
    share = ok.get("adaptive", {}).get("of_the_better")
    if missing or share is None:
        return Verdict(bar, None, f"Not measured: {', '.join(missing) or 'any other server'}.")
    return Verdict(bar, share >= OF_THE_BETTER, f"{share:.3f} of the better.")


def overlap(cells: dict[Cell, dict[str, Row]]) -> str:
    """A table of unified rounds without and with overlap scheduling: two steps of the ablation."""
    lines = [["context", "requests", "overlap off", "overlap on", "on / off"]]
    for (context, requests), rows in cells.items():
        off, on = (rows.get(name, {}).get("tokens_per_s") for name in ("unified", "delayed"))
        ratio = on / off if on and off else None
        lines.append([f"{context:,}", str(requests), _number(off, ",.1f"), _number(on, ",.1f"),
                      _number(ratio, ".2f")])  # fmt: skip
    return plot.aligned(lines, markdown=True)


def report(files: Runs, scale: Scale, plan: Sequence[Entry]) -> str:
    """All tables and bars in Markdown; parts of which nothing was measured are left out."""
    everything = [run for name in files for run in files[name]]
    if not everything:
        return "Nothing was measured."
    parts = ["# Serving figures", _where(everything)]
    matrix_runs = runs_of(files, "plain", "adaptive", "fixed")
    matrix = {cell: rows for cell, rows in by_cell(matrix_runs).items() if cell in scale.matrix}
    if matrix:
        parts += ["## Steady decoding, tokens/s", speeds(matrix, ("plain", "adaptive", "fixed")),
                  str(never_below_plain(matrix, scale.matrix))]  # fmt: skip
    if swings := latest(plot.swings_of(matrix_runs)):
        parts += ["## A load that swings, tokens/s", _table(swings, plot.SWING_COLUMNS),
                  str(swing_bar(swings))]  # fmt: skip
    steps = {cell: rows for cell, rows in by_cell(ablation_runs(files)).items() if cell in scale.ablation}
    if any(set(rows) - {"plain"} for rows in steps.values()):
        parts += ["## Ablation, tokens/s", speeds(steps, ("plain", *STEPS)),
                  "Overlap scheduling is what `delayed` adds to `unified`:", overlap(steps)]  # fmt: skip
    answered = runs_of(files, "control", "plain", "prompts-adaptive", "adaptive", "prompts-ngram")
    if answers := latest(plot.rows_of(answered, "prompt_runs")):
        parts += ["## Problems from start to end", _table(answers, plot.RUN_COLUMNS)]
    if waiting := full_pool(files):
        parts += ["## The same with a KV pool that is full", waiting]
    return "\n\n".join([*parts, *_lacking(files, plan)])


def full_pool(files: Runs) -> str:
    """How often requests left the pool, and what it cost, by server; "" where nothing was measured."""
    lines = [
        [
            "server",
            "tokens/s",
            "right",
            "taken out",
            "computed anew",
            "copied out",
            "copied in",
            "pool in use",
        ]
    ]
    for name in ("plain", "retracts", "offloads"):
        found = [row for run in files.get(f"full-pool-{name}", ()) for row in run["prompt_runs"]
                 if row["status"] == "ok"]  # fmt: skip
        for row in found[-1:]:
            offload = row.get("offload", {})
            told = (offload.get(key) for key in ("recomputed_tokens", "offloaded_tokens", "loaded_tokens"))
            lines.append([name, _number(row["tokens_per_s"], ",.1f"), f"{row['right']} of {row['problems']}",
                          _number(row["retractions"], ",d"), *(_number(each, ",d") for each in told),
                          _number(offload.get("pool_usage_mean"), ".3f")])  # fmt: skip
    return plot.aligned(lines, markdown=True) if lines[1:] else ""


def ablation_runs(files: Runs) -> list[dict[str, Any]]:
    """Runs of the ablation; its plain decoding is the nearest in time that there is."""
    steps = [name for name in files if name.startswith("ablation-")]
    return runs_of(files, *steps, "control", "plain")


def draw(files: Runs, out: Path, scale: Scale) -> list[Path]:
    """Write the plots for which there are figures; returns their files. Raises plot.PlotError."""
    kinds: tuple[tuple[str, Callable[..., None], list[dict[str, Any]], Sequence[Cell]], ...] = (
        ("matrix.png", plot.draw, runs_of(files, "plain", "adaptive", "fixed"), scale.matrix),
        ("ablation.png", plot.draw_steps, ablation_runs(files), scale.ablation),
    )
    drawn = []
    for name, function, runs, wanted in kinds:
        kept = [run | {"cells": [found for found in run["cells"]
                                 if (found["context"], found["concurrency"]) in wanted]}
                for run in runs]  # fmt: skip
        rows = plot.rows_of(kept)
        if any(row["speedup"] is not None and row["algorithm"] != "plain" for row in rows):
            function(kept, out / name)
            drawn.append(out / name)
    return drawn


def _table(rows: Sequence[Row], columns: dict[str, str]) -> str:
    return plot.table_of(rows, columns, markdown=True)


def _number(value: float | None, digits: str) -> str:
    return "" if value is None else format(value, digits)


def _name(cell: Cell) -> str:
    return f"{cell[1]} x {cell[0]:,}"


def _where(runs: Sequence[dict[str, Any]]) -> str:
    machines = {", ".join(run["machine"]["gpus"]) or run["machine"]["cpu"] for run in runs}
    times = sorted(run["started"] for run in runs)
    models = ", ".join(sorted({run["model"] for run in runs}))
    return f"{models} on {'; '.join(sorted(machines))}, servers started {times[0]} to {times[-1]}."


def _lacking(files: Runs, plan: Sequence[Entry]) -> list[str]:
    """What was not measured, and the reasons that servers gave."""
    lines = []
    for entry in plan:
        runs = files.get(entry.name, ())
        left = remaining(entry, runs)
        if left.is_empty:
            continue
        reasons = [facts.get("reason", "") for facts in runs[-1]["servers"].values()] if runs else []
        reasons += [found["reason"] for run in runs[-1:] for kind in ("cells", "swings", "prompt_runs")
                    for found in run[kind] if found["status"] not in DONE]  # fmt: skip
        why = next((reason.splitlines()[0] for reason in reasons if reason), "")
        lines.append(f"- {entry.name}: {left}{': ' + why if why else ''}")
    return ["## Not measured", "\n".join(lines)] if lines else []
