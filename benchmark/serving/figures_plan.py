"""What figures.py measures: its servers in order, what is left of them, and how long each may take."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import results
from sweep_options import UsageError

HERE = Path(__file__).parent
PROMPTS = HERE.parent / "reasoner" / "prompts-12k.jsonl"
STEPS = ("naive", "unified", "delayed", "adaptive")  # algorithms of sweep.py, each with one thing more
OVERHEAD_S = 20.0  # of a server, besides what its results file tells: imports, prompts, warm-up, the end
DONE = ("ok", "does not fit")
# Options of sweep.py, as its results file holds them, that must be the same in all runs of one file.
SETTINGS = ("algorithms", "server_flags", "sparsespec_config", "ngram_flags", "max_new_tokens", "seed")

Cell = tuple[int, int]  # tokens of context, requests
Runs = Mapping[str, Sequence[dict[str, Any]]]  # runs of a results file, by the name of its server


@dataclass(frozen=True)
class Entry:
    """One server and what is measured on it. `config`: of SPARSESPEC, over the scale's own. `flags`: of the
    server, besides those of the scale."""

    name: str
    algorithm: str
    config: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    swing_s: float = 0.0
    prompts: bool = False
    flags: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to measure."""
        return not (self.cells or self.swing_s or self.prompts)

    def __str__(self) -> str:
        parts = [f"{len(self.cells)} cells"] if self.cells else []
        parts += [f"a swing of {self.swing_s:.0f} s"] if self.swing_s else []
        parts += [PROMPTS.name] if self.prompts else []
        return " and ".join(parts) or "nothing"


@dataclass(frozen=True)
class Scale:
    """The loads, and guesses of the times for as long as nothing was measured.

    Attributes:
        config, drafts: SPARSESPEC's configuration of all servers, and besides of those that are to be fast.
        swing: few requests, many, tokens of their prompts; swing_s: seconds of plain decoding, of the others.
        full_pool: flags of servers whose KV pool holds a part of the prompts file's requests at a time.
        start_s: until a plain server, and one that speculates, is up.
        cell_s, prefill: seconds of a cell besides its prefill, and prompt tokens that are read in a second.
    """

    server_flags: str
    config: Mapping[str, Any]
    drafts: Mapping[str, Any]
    matrix: tuple[Cell, ...]
    ablation: tuple[Cell, ...]
    swing: tuple[int, int, int]
    swing_period: float
    swing_s: tuple[float, float]
    new_tokens: int
    answer_tokens: int
    at_a_time: int
    ngram: bool
    start_s: tuple[float, float]
    cell_s: float
    prefill: float
    prompts_s: float
    full_pool: str

    def cell_guess_s(self, cell: Cell) -> float:
        """Seconds that a cell takes, by the guesses."""
        return self.cell_s + cell[0] * cell[1] / self.prefill


def _grid(contexts: Sequence[int], concurrency: Sequence[int]) -> tuple[Cell, ...]:
    return tuple((context, requests) for context in contexts for requests in concurrency)


SCALES = {
    "full": Scale(
        server_flags="--mem-fraction-static 0.88 --cuda-graph-backend-prefill disabled "
        "--max-running-requests 96 --cuda-graph-bs-decode 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32 34 40 48 "
        "56 64 80 96",
        config={"stride": 6},
        drafts={"draft_weights": "int4+fp8"},
        matrix=_grid((2048, 8192, 15360), (1, 2, 4, 8, 16, 32, 64, 96)),
        ablation=_grid((4096, 8192), (8, 64)),
        swing=(2, 48, 8192),
        swing_period=5.0,
        swing_s=(60.0, 120.0),
        new_tokens=256,
        answer_tokens=16384,
        at_a_time=34,
        ngram=True,
        start_s=(110.0, 160.0),
        cell_s=2.0,
        prefill=100_000.0,
        prompts_s=150.0,
        full_pool="--max-total-tokens 100000",
    ),
    # For the CPU platform, which has neither quantised products nor SGLang's own drafters.
    "small": Scale(
        server_flags="--max-running-requests 4",
        config={"stride": 4, "attention": "torch_paged"},
        drafts={},
        matrix=_grid((192, 384), (1, 3)),
        ablation=_grid((192, 256), (2,)),
        swing=(1, 3, 192),
        swing_period=2.0,
        swing_s=(4.0, 8.0),
        new_tokens=24,
        answer_tokens=16,
        at_a_time=4,
        ngram=False,
        start_s=(25.0, 30.0),
        cell_s=2.0,
        prefill=1000.0,
        prompts_s=30.0,
        full_pool="--max-total-tokens 700 --hicache-ratio 4",
    ),
}


def entries(scale: Scale, *, share_servers: bool = False) -> list[Entry]:
    """All servers, the most important first.

    With `share_servers` the ablation's plain cells and the prompts file are measured on the first two: no
    other server of the same flags is started for them.
    """
    plain_s, other_s = scale.swing_s
    fast = {**scale.drafts, "lookup": "on"}
    plain = Entry("plain", "plain", {}, scale.matrix, plain_s)
    adaptive = Entry("adaptive", "adaptive", fast, scale.matrix, other_s)
    same = {**scale.drafts, "adapt": "off", "schedule": "lockstep"}
    fixed = Entry("fixed", "sparsespec", same, scale.matrix, other_s)
    steps = [Entry(f"ablation-{step}", step, {}, scale.ablation) for step in STEPS]
    ngram = [Entry("prompts-ngram", "ngram", prompts=True)] if scale.ngram else []
    if share_servers:
        cells = tuple(sorted({*plain.cells, *scale.ablation}))
        shared = [replace(plain, cells=cells, prompts=True), replace(adaptive, prompts=True)]
        return [*shared, fixed, *steps, *ngram, *_full_pool(scale, fast)]
    control = Entry("control", "plain", {}, scale.ablation, prompts=True)
    answers = Entry("prompts-adaptive", "adaptive", fast, prompts=True)
    return [plain, adaptive, fixed, *steps, control, answers, *ngram, *_full_pool(scale, fast)]


def _full_pool(scale: Scale, fast: Mapping[str, Any]) -> list[Entry]:
    """Servers that must take requests out: plain, and SPARSESPEC that computes KV anew, or offloads it."""
    kinds = {"plain": ("plain", {}), "retracts": ("adaptive", fast),
             "offloads": ("adaptive", {**fast, "offload": "on"})}  # fmt: skip
    return [
        Entry(f"full-pool-{name}", algorithm, config, prompts=True, flags=scale.full_pool)
        for name, (algorithm, config) in kinds.items()
    ]


def chosen(plan: Sequence[Entry], only: Sequence[str]) -> list[Entry]:
    """The named servers of a plan, in its order; all where none is named. Raises UsageError."""
    names = [entry.name for entry in plan]
    if unknown := [name for name in only if name not in names]:
        raise UsageError(f"--only: unknown {', '.join(unknown)}; there are {', '.join(names)}.")
    return [entry for entry in plan if not only or entry.name in only]


def remaining(entry: Entry, runs: Sequence[dict[str, Any]]) -> Entry:
    """What the runs of a server's results file lack; an empty entry where they lack nothing."""

    def ok(kind: str) -> bool:
        return any(found["status"] == "ok" for run in runs for found in run[kind])

    done = {(c["context"], c["concurrency"]) for run in runs for c in run["cells"] if c["status"] in DONE}
    return replace(
        entry,
        cells=tuple(cell for cell in entry.cells if cell not in done),
        swing_s=0.0 if ok("swings") else entry.swing_s,
        prompts=entry.prompts and not ok("prompt_runs"),
    )


def file_of(out: Path, name: str) -> Path:
    """The results file of a server in a folder."""
    return out / f"{name}.json"


def read_runs(out: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Runs of the servers that have a results file in a folder. Raises results.ResultsError."""
    paths = {name: file_of(out, name) for name in names}
    return {name: results.read(path)["runs"] for name, path in paths.items() if path.exists()}


def sweep_options(
    entry: Entry, scale: Scale, *, model: str, out: Path, traces: Path, server_flags: str
) -> list[str]:
    """The options of sweep.py that measure an entry."""
    few, many, context = scale.swing
    options = ["--model-path", model, "--out", str(file_of(out, entry.name)), "--traces", str(traces)]
    options += ["--algorithms", entry.algorithm, "--max-new-tokens", str(scale.new_tokens)]
    options += [f"--server-flags={' '.join([server_flags, *entry.flags.split()])}", "--context"]
    if entry.algorithm not in ("plain", "ngram"):
        options += ["--sparsespec-config", json.dumps({**scale.config, **entry.config})]
    if entry.cells:
        options += ["--cells", *(f"{requests}x{tokens}" for tokens, requests in entry.cells)]
    if entry.swing_s:
        options += ["--swing", str(few), str(many), "--swing-context", str(context)]
        options += ["--swing-period", str(scale.swing_period), "--swing-seconds", str(entry.swing_s)]
    if entry.prompts:
        # As a relative path: results files should not tell of anyone's folders.
        options += ["--prompts", os.path.relpath(PROMPTS), "--concurrency-run", str(scale.at_a_time)]
        options += ["--max-answer-tokens", str(scale.answer_tokens)]
    return options


def expected_s(entry: Entry, scale: Scale, runs: Runs) -> float:
    """Seconds that a server and its measurements take, by those of earlier servers, else by guesses."""
    earlier = [run for of_one in runs.values() for run in of_one]
    plain = entry.algorithm == "plain"
    start = scale.start_s[not plain]
    cells: dict[Cell, float] = {}
    answers = scale.prompts_s
    for run in earlier:
        for algorithm, facts in run["servers"].items():
            if (algorithm == "plain") == plain:
                start = facts.get("up_s", start)
        for found in run["cells"]:
            cell = found["context"], found["concurrency"]
            if found["status"] in DONE:
                took = found.get("prefill_s", 0.0) + found.get("window_s", 0.0)
                cells[cell] = max(took, cells.get(cell, 0.0))
        for found in run["prompt_runs"]:
            answers = found.get("seconds", answers)
    measured = {cell: took for cell, took in cells.items() if took}
    guessed = sum(map(scale.cell_guess_s, measured))
    pace = sum(measured.values()) / guessed if guessed else 1.0
    total = OVERHEAD_S + start
    total += sum(cells.get(cell, pace * scale.cell_guess_s(cell)) for cell in entry.cells)
    if entry.swing_s:
        _, many, context = scale.swing
        total += entry.swing_s + pace * scale.cell_guess_s((context, many))
    return total + answers * entry.prompts
