"""The command that measures all serving figures: its plan, budget, resumption, report and bars. No server."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "python/sglang_sparsespec/assets/reasoner-5m"
# Stands for sweep.py: makes figures up, and fails after so many cells as the file `how` says of the server.
SWEEP = """
import json, pathlib, sys, time
sys.path[:0] = [{serving!r}]
import results, sweep_options
args = sweep_options.parse_args(sys.argv[1:])
how = json.loads(pathlib.Path({how!r}).read_text())
run = {{**results.header(), "model": pathlib.Path(args.model_path).name,
       "options": {{k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()
                   if k != "problems"}}}}
file = results.ResultFile(args.out, run)
algorithm, = args.algorithms
file.run["servers"][algorithm] = {{"status": "ok", "up_s": 1.0}}
file.save()
for at, (context, requests) in enumerate(sweep_options.grid_of(args)):
    if at == how.get(args.out.stem, 99):
        time.sleep(how["sleep"])
        sys.exit(1)
    file.add("cells", {{"algorithm": algorithm, "context": context, "concurrency": requests, "status": "ok",
                       "tokens_per_s": 100.0, "prefill_s": 1.0, "window_s": 2.0}})
if args.swing:
    file.add("swings", {{"algorithm": algorithm, "context": args.swing_context, "concurrency": args.swing[1],
                        "few_requests": args.swing[0], "status": "ok", "tokens_per_s": 9.0, "few": 4.0,
                        "many": 14.0}})
if args.problems:
    file.add("prompt_runs", {{"algorithm": algorithm, "concurrency": 4, "prompts": args.prompts.name,
                             "status": "ok", "tokens_per_s": 30.0, "seconds": 7.0}})
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmark/serving by its name."""
    for folder in ("reasoner", "serving"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmark" / folder))
    return importlib.import_module


@pytest.fixture
def small(load: Any) -> Any:
    return load("figures_plan").SCALES["small"]


@pytest.fixture
def full(load: Any) -> Any:
    return load("figures_plan").SCALES["full"]


def arguments(load: Any, out: Path, *more: str) -> Any:
    return load("figures").parse_args(
        ["--model-path", str(MODEL), "--out", str(out), "--scale", "small", *more]
    )


def figures(load: Any, tmp_path: Path, *more: str, **how: float) -> Any:
    """The command on a folder, with servers that are made up: {name: cells until it fails}, sleep: before."""
    (tmp_path / "how.json").write_text(json.dumps({"sleep": 0, **how}))
    script = SWEEP.format(serving=str(ROOT / "benchmark/serving"), how=str(tmp_path / "how.json"))
    (tmp_path / "sweep.py").write_text(script)
    command = [sys.executable, str(tmp_path / "sweep.py")]
    return load("figures").Figures(arguments(load, tmp_path / "out", *more), command)


def run(*cells: Any, **more: Any) -> dict[str, Any]:
    made = {"model": "m", "machine": {"gpus": ["GPU"], "cpu": "x"}, "started": "2026-01-01T00:00:00+00:00"}
    made |= {"servers": {}, "cells": list(cells), "swings": [], "prompt_runs": []}
    return made | more


def cell(algorithm: str, context: int, requests: int, speed: float | None, **more: Any) -> dict[str, Any]:
    base = {"algorithm": algorithm, "context": context, "concurrency": requests, "new_tokens": 256, "lead": 0}
    if speed is None:
        return {**base, "status": "does not fit", "reason": "too long", **more}
    return {**base, "status": "ok", "tokens_per_s": speed, **more}


def swing(algorithm: str, few: float, many: float) -> dict[str, Any]:
    return {"algorithm": algorithm, "context": 8192, "concurrency": 48, "few_requests": 2, "status": "ok",
            "tokens_per_s": (few + many) / 2, "few": few, "many": many}  # fmt: skip


# -- the plan


def test_the_most_important_servers_come_first(load: Any, full: Any) -> None:
    plan = load("figures_plan").entries(full)
    assert [entry.name for entry in plan] == [
        "plain", "adaptive", "fixed", "ablation-naive", "ablation-unified", "ablation-delayed",
        "ablation-adaptive", "control", "prompts-adaptive", "prompts-ngram",
        "full-pool-plain", "full-pool-retracts", "full-pool-offloads",
    ]  # fmt: skip
    assert [len(entry.cells) for entry in plan] == [24, 24, 24, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0]
    assert [entry.swing_s for entry in plan[:4]] == [60.0, 120.0, 120.0, 0.0]
    assert [entry.name for entry in plan if entry.prompts] == [entry.name for entry in plan[7:]]


def test_shared_servers_measure_the_same_with_two_starts_less(load: Any, full: Any) -> None:
    entries = load("figures_plan").entries
    apart, shared = entries(full), entries(full, share_servers=True)
    assert len(shared) == len(apart) - 2

    def measured(plan: Any) -> set[Any]:
        kinds = {(entry.algorithm, str(entry.config), *cell) for entry in plan for cell in entry.cells}
        return kinds | {(entry.algorithm, "prompts") for entry in plan if entry.prompts}

    assert measured(shared) == measured(apart)


@pytest.mark.parametrize("scale", ["full", "small"])
def test_every_server_of_a_plan_is_one_that_sweep_takes(load: Any, tmp_path: Path, scale: str) -> None:
    args = arguments(load, tmp_path, "--scale", scale)
    command = load("figures").Figures(args)
    options = load("sweep_options")
    for entry in command.plan:
        parsed = options.parse_args(command._options(entry))
        assert options.grid_of(parsed) == sorted(entry.cells)
        assert parsed.out == tmp_path / f"{entry.name}.json"
        flags = options.server_flags(entry.algorithm, parsed, "cuda")
        assert flags.count("--max-running-requests") == 1
        if entry.name == "adaptive" and scale == "full":
            config = json.loads(flags[flags.index("--sparsespec-config") + 1])
            assert config == {"stride": 6, "draft_weights": "int4+fp8", "lookup": "on", "schedule": "auto",
                              "adapt": "on"}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--only", "plain", "fastest"], "unknown fastest; there are plain, adaptive"),
        (["--server-flags", "--port 3"], "--port"),
        (["--model-path", "/nowhere/model"], "'/nowhere/model'"),
        (["--report", "--out", "/nowhere/out"], "/nowhere/out"),
        (["--out", __file__], "no folder"),
    ],
)
def test_what_cannot_be_used_is_named_before_a_server_starts(
    load: Any, tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model-path", str(MODEL), "--out", str(tmp_path / "out"), "--scale", "small", *options]
    assert load("figures").main(given) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_or_report_is_needed(load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("figures").main(["--out", str(tmp_path)]) == 2
    assert "--model-path is missing" in capsys.readouterr().err
    for given in ("0", "-3", "x", "1.5"):
        with pytest.raises(SystemExit):
            load("figures").parse_args(["--out", str(tmp_path), "--report", "--budget-s", given])


def test_prompts_of_another_tokenizer_are_refused(load: Any, tmp_path: Path) -> None:
    traces = load("traces")
    traces.TraceStore(tmp_path / "t.json", lambda text: [1] * len(text)).get(1, 300, 5)
    with pytest.raises(traces.TraceError, match="tokenizer"):
        load("figures").Figures(arguments(load, tmp_path, "--traces", str(tmp_path / "t.json")))


# -- what is left, and how long it takes


def test_what_is_left_is_what_no_run_has_measured(load: Any, small: Any) -> None:
    plans = load("figures_plan")
    entry = plans.entries(small)[0]
    done = [cell("plain", *small.matrix[0], 5.0), cell("plain", *small.matrix[1], None)]
    failed = cell("plain", *small.matrix[2], 5.0, status="failed", reason="x")
    runs = [run(done[0], failed), run(done[1], swings=[{"status": "failed"}])]
    left = plans.remaining(entry, runs)
    assert left.cells == small.matrix[2:] and left.swing_s == entry.swing_s and not left.is_empty
    runs.append(run(*(cell("plain", *at, 5.0) for at in small.matrix), swings=[{"status": "ok"}]))
    assert plans.remaining(entry, runs).is_empty
    answers = replace(entry, prompts=True)
    assert plans.remaining(answers, runs).prompts
    assert plans.remaining(answers, [run(prompt_runs=[{"status": "ok"}]), *runs]).is_empty


def test_times_are_guessed_until_they_are_measured(load: Any, full: Any) -> None:
    plans = load("figures_plan")
    plain, adaptive, *_, ngram = plans.entries(full)[:10]
    guess = plans.expected_s(adaptive, full, {})
    assert 300 < guess < 600
    cells = [cell("plain", *at, 5.0, prefill_s=1.0, window_s=2 * full.cell_guess_s(at) - 1)
             for at in full.matrix[:4]]  # fmt: skip
    cells.append(cell("plain", *full.matrix[4], None))
    files = {"plain": [run(*cells, servers={"plain": {"up_s": 50.0}})]}
    parts = replace(plain, swing_s=0.0, cells=full.matrix[:6])
    twice = 2 * sum(full.cell_guess_s(at) for at in (*full.matrix[:4], full.matrix[5]))
    assert plans.expected_s(parts, full, files) == pytest.approx(plans.OVERHEAD_S + 50 + twice)
    # A server that speculates takes longer to start: its own guess stands until one was measured.
    one = replace(adaptive, swing_s=0.0, cells=full.matrix[:1])
    start = plans.expected_s(one, full, files) - plans.expected_s(
        replace(one, algorithm="plain"), full, files
    )
    assert start == pytest.approx(full.start_s[1] - 50)
    answers = [{"status": "ok", "seconds": 33.0}]
    files["control"] = [run(prompt_runs=answers, servers={"adaptive": {"up_s": 70.0}, "x": {}})]
    assert plans.expected_s(ngram, full, files) == pytest.approx(plans.OVERHEAD_S + 70 + 33)


# -- one server after the other


def test_what_is_complete_is_skipped_and_what_was_cut_off_is_completed(
    load: Any, tmp_path: Path, small: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    only = ("--only", "plain", "fixed", "control")
    first = figures(load, tmp_path, *only, fixed=3)
    first.run()
    assert not first.report()
    assert "- fixed: 1 cells and a swing of 8 s" in capfd.readouterr().out
    again = figures(load, tmp_path, *only)
    again.run()
    said = capfd.readouterr().out
    assert "plain: complete, skipped." in said and "control: complete, skipped." in said
    files = again.files()
    assert [len(runs) for runs in files.values()] == [1, 2, 1]
    assert [len(measured["cells"]) for measured in files["fixed"]] == [3, 1]
    assert again.report()
    assert (tmp_path / "out/report.md").read_text().startswith("# Serving figures\n")


def test_nothing_starts_that_would_take_longer_than_what_is_left(
    load: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = figures(load, tmp_path, "--only", "plain", "adaptive", "--budget-s", "40")
    first.run()
    said = capfd.readouterr().out
    assert "Not started: plain, adaptive." in said and "40 s of --budget-s" in said
    assert not first.files() and not first.report()


def test_what_was_measured_says_what_still_fits_into_the_budget(
    load: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Guesses: 50 s until a server that speculates is up, 6 for the cells, 30 for the prompts file.
    figures(load, tmp_path, "--only", "prompts-adaptive", "--budget-s", "65").run()
    assert "Not started: prompts-adaptive." in capfd.readouterr().out
    figures(load, tmp_path, "--only", "ablation-naive", "prompts-adaptive", "--budget-s", "65").run()
    said = capfd.readouterr().out
    assert "ablation-naive: took" in said and "prompts-adaptive: took" in said, "the first was up at once"


def test_a_server_that_outlasts_the_budget_is_ended_and_keeps_its_figures(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load("figures_plan"), "expected_s", lambda *args: 0.0)
    late = figures(load, tmp_path, "--only", "plain", "fixed", "--budget-s", "6", plain=2, sleep=600)
    late.run()
    assert "plain: ended, because --budget-s is over." in capfd.readouterr().out
    assert {name: len(runs[0]["cells"]) for name, runs in late.files().items()} == {"plain": 2}


def test_a_signal_ends_the_sweep_and_still_makes_the_report(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = load("figures")
    command = figures(load, tmp_path, "--only", "plain", plain=1, sleep=600)
    monkeypatch.setattr(module, "Figures", lambda args: command)

    def kill() -> None:
        for _ in range(600):
            if (runs := command.files().get("plain")) and runs[0]["cells"]:
                break
            threading.Event().wait(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert module.main(["--model-path", str(MODEL), "--out", str(tmp_path / "out")]) == 130
    finally:
        killer.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capfd.readouterr().out
    assert "Stopped;" in said and "- plain: 3 cells and a swing of 4 s" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, 'measured with model "other"'),
        ({"machine": {"gpus": ["other"]}}, "measured with machine"),
        ({"options": {"server_flags": ["--tp-size", "2"]}}, "measured with"),
    ],
)
def test_figures_of_something_else_are_not_added_to(
    load: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    figures(load, tmp_path, "--only", "control").run()
    path = tmp_path / "out/control.json"
    data = json.loads(path.read_text())
    data["runs"][0] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(load("sweep_options").UsageError, match=named):
        figures(load, tmp_path)
    figures(load, tmp_path, "--only", "plain")  # does not touch that file
    figures(load, tmp_path, "--report")


def test_a_broken_results_file_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/fixed.json").write_text("{")
    with pytest.raises(load("results").ResultsError, match=r"fixed\.json"):
        figures(load, tmp_path)


# -- the report


def made_up(full: Any, *, adaptive: float = 1.2, at: tuple[int, int] = (8192, 16)) -> dict[str, Any]:
    """Files of all servers; the adaptive one is at 1.5 x plain, and at `adaptive` x plain in one cell."""
    fits = [found for found in full.matrix if found[0] * found[1] < 700_000]
    rest = [found for found in full.matrix if found not in fits]

    def cells(name: str, ratio: float, wanted: Any = fits) -> list[dict[str, Any]]:
        length = None if name == "plain" else 3.25
        made = []
        for found in wanted:
            times = adaptive if found == at and name == "adaptive" else ratio
            made.append(cell(name, *found, 100.0 * found[1] * times, acceptance_length=length))
        return made + [cell(name, *found, None) for found in rest if wanted is fits]

    def answers(name: str, speed: float) -> list[dict[str, Any]]:
        return [{"algorithm": name, "prompts": "prompts-12k.jsonl", "concurrency": 34, "status": "ok",
                 "tokens_per_s": speed, "right": 33, "problems": 34}]  # fmt: skip

    steps = {"naive": 0.8, "unified": 1.0, "delayed": 1.1, "adaptive": 1.3}
    files = {
        "plain": [run(*cells("plain", 1.0), swings=[swing("plain", 300.0, 2000.0)])],
        "adaptive": [run(*cells("adaptive", 1.5), swings=[swing("adaptive", 330.0, 2970.0)])],
        "fixed": [run(*cells("sparsespec", 1.4), swings=[swing("sparsespec", 200.0, 3000.0)])],
        "control": [run(*cells("plain", 1.0, full.ablation), prompt_runs=answers("plain", 2000.0))],
        "prompts-adaptive": [run(prompt_runs=answers("adaptive", 3600.0))],
        "prompts-ngram": [run(prompt_runs=answers("ngram", 2600.0))],
    }
    told = {"recomputed_tokens": 0, "offloaded_tokens": 81_000, "loaded_tokens": 70_000,
            "pool_usage_mean": 0.9712}  # fmt: skip
    for kind, name, speed, more in (("plain", "plain", 900.0, {}), ("retracts", "adaptive", 1500.0, {}),
                                    ("offloads", "adaptive", 2100.0, {"offload": told})):  # fmt: skip
        found = answers(name, speed)[0] | {"retractions": 12} | more
        files[f"full-pool-{kind}"] = [run(prompt_runs=[found])]
    for name, ratio in steps.items():
        files[f"ablation-{name}"] = [run(*cells(name, ratio, [c for c in full.ablation if c != at]))]
    return files


def row(text: str, *first: str) -> list[str]:
    """The cells of the first table row that begins so."""
    rows = ([part.strip() for part in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith("|"))  # fmt: skip
    return next(found for found in rows if found[: len(first)] == list(first))


def test_the_report_of_a_whole_sitting(load: Any, full: Any) -> None:
    plan = load("figures_plan").entries(full)
    text = load("figures_report").report(made_up(full), full, plan)
    found = row(text, "8,192", "16")
    assert found == ["8,192", "16", "1,600.0", "1,920.0", "1.20", "3.25", "2,240.0", "1.40", "3.25"]
    assert row(text, "15,360", "64")[2:4] == ["does not fit", "does not fit"]
    assert "adaptive never below 0.97 x plain: **pass**" in text and "Lowest: 1.200 at 16 x 8,192." in text
    assert "better of plain and fixed: **pass**. 1.000 of the better." in text
    assert row(text, "fixed")[-1] == "" and row(text, "adaptive", "8192")[-1] == "1.000"
    ablation = text.split("## Ablation")[1]
    steps = row(ablation, "4,096", "8")
    assert steps[2] == "800.0" and steps[3::3] == ["640.0", "800.0", "880.0", "1,040.0"]
    assert steps[4::3] == ["0.80", "1.00", "1.10", "1.30"]
    assert row(ablation.split("Overlap")[1], "4,096", "8") == ["4,096", "8", "800.0", "880.0", "1.10"]
    answers = text.split("## Problems")[1]
    assert row(answers, "adaptive")[4] == "1.80" and row(answers, "ngram")[4] == "1.30"
    pool = text.split("full\n")[1]
    assert row(pool, "plain") == ["plain", "900.0", "33 of 34", "12", "", "", "", ""]
    assert row(pool, "offloads")[3:] == ["12", "0", "81,000", "70,000", "0.971"]
    assert "Not measured" not in text


def test_a_cell_below_the_bar_is_named(load: Any, full: Any) -> None:
    text = load("figures_report").report(made_up(full, adaptive=0.969), full, [])
    assert "x plain: **fail**" in text and "Below: 16 x 8,192 (0.969)." in text
    exactly = load("figures_report").report(made_up(full, adaptive=0.97), full, [])
    assert "x plain: **pass**" in exactly


def test_a_bar_is_open_while_figures_are_missing(load: Any, full: Any) -> None:
    reported = load("figures_report").report
    files = made_up(full)
    files["adaptive"][0]["cells"].pop(0)
    text = reported(files, full, [])
    assert "x plain: **open**" in text and "Not compared: 1 x 2,048." in text
    del files["fixed"]
    assert "better of plain and fixed: **open**. Not measured: fixed." in reported(files, full, [])
    # What fails already stays failed, whatever is missing.
    files["adaptive"][0]["cells"][0] |= {"tokens_per_s": 1.0}
    assert "x plain: **fail**" in reported(files, full, [])


def test_a_load_that_only_plain_decoding_can_hold_leaves_the_bar_open(load: Any, full: Any) -> None:
    files = made_up(full)
    found = next(c for c in files["adaptive"][0]["cells"] if (c["context"], c["concurrency"]) == (8192, 64))
    found |= {"status": "does not fit", "reason": "too long"}
    text = load("figures_report").report(files, full, [])
    assert "x plain: **open**" in text and "Not compared: 64 x 8,192." in text


def test_a_swing_below_the_bar_fails(load: Any, full: Any) -> None:
    files = made_up(full)
    files["adaptive"][0]["swings"] = [swing("adaptive", 300.0, 2800.0)]
    assert "fixed: **fail**. 0.939 of the better." in load("figures_report").report(files, full, [])


def test_the_report_of_one_server_tells_what_is_missing(load: Any, full: Any) -> None:
    plan = load("figures_plan").entries(full)
    files = {"plain": made_up(full)["plain"]}
    files["fixed"] = [run(servers={"sparsespec": {"status": "failed", "reason": "no memory.\nlog"}})]
    text = load("figures_report").report(files, full, plan)
    assert "## Ablation" not in text and "## Problems" not in text
    assert "- fixed: 24 cells and a swing of 120 s: no memory.\n" in text
    assert "- prompts-ngram: prompts-12k.jsonl" in text and "- plain" not in text
    assert load("figures_report").report({}, full, plan) == "Nothing was measured."


def test_plain_decoding_that_was_measured_later_serves_for_the_ablation_alone(load: Any, full: Any) -> None:
    files = made_up(full)
    for found in files["control"][0]["cells"]:
        found["tokens_per_s"] *= 2
    text = load("figures_report").report(files, full, [])
    assert row(text, "8,192", "8")[4] == "1.50"
    assert row(text.split("## Ablation")[1], "8,192", "8")[2:5] == ["1,600.0", "640.0", "0.40"]
    del files["control"]
    text = load("figures_report").report(files, full, [])
    assert row(text.split("## Ablation")[1], "8,192", "8")[2:5] == ["800.0", "640.0", "0.80"]


def test_plots_are_drawn_where_there_are_ratios(load: Any, full: Any, tmp_path: Path) -> None:
    draw = load("figures_report").draw
    assert draw({"plain": made_up(full)["plain"]}, tmp_path, full) == []
    pytest.importorskip("matplotlib")
    names = [path.name for path in draw(made_up(full), tmp_path, full)]
    assert names == ["matrix.png", "ablation.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
