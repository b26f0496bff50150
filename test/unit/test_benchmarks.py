"""The arithmetic of the benchmark scripts: prompts, cells, results, tables, plots. No server, no GPU."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from sglang_sparsespec._server import ServerError
from sglang_sparsespec.config import ConfigError

BENCHMARK = Path(__file__).parents[2] / "benchmark"
MODEL = Path(__file__).parents[2] / "python/sglang_sparsespec/assets/reasoner-5m"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmark/serving or benchmark/kernels by its name."""
    for folder in ("reasoner", "serving", "kernels"):
        monkeypatch.syspath_prepend(str(BENCHMARK / folder))
    return importlib.import_module


@pytest.fixture
def encode(load: Any) -> Any:
    return load("tokens").encode


# -- prompts of exact length


@pytest.mark.parametrize("context", [200, 777])
def test_traces_are_exactly_as_long_as_asked_and_cut_within_the_chain(
    load: Any, encode: Any, context: int
) -> None:
    made = load("traces").make_traces(9, context, 50, seed=1, encode=encode)
    assert [len(trace.ids) for trace in made] == [context] * 9
    assert all(trace.prompt_tokens <= context - 64 for trace in made)
    text = load("tokens").decode(made[0].ids)
    assert text.startswith("<|im_start|>user\n") and "<think>" in text and "</think>" not in text


def test_requests_share_no_more_than_the_opening_words(load: Any, encode: Any) -> None:
    traces = load("traces")
    made = traces.make_traces(14, 500, 50, seed=1, encode=encode)
    assert traces.shared_prefix(made) < 40
    assert traces.shared_prefix(made[:1]) == 0
    assert traces.shared_prefix([*made, made[0]]) == 500


def test_traces_follow_from_the_seed_and_fewer_are_the_first_of_more(load: Any, encode: Any) -> None:
    traces = load("traces")
    more = traces.make_traces(8, 300, 50, seed=1, encode=encode)
    assert traces.make_traces(3, 300, 50, seed=1, encode=encode) == more[:3]
    assert traces.make_traces(3, 300, 50, seed=2, encode=encode) != more[:3]


def test_a_tokenizer_that_makes_fewer_tokens_gets_longer_problems(load: Any, encode: Any) -> None:
    made = load("traces").make_traces(3, 300, 50, seed=1, encode=lambda text: encode(text)[::2])
    assert [len(trace.ids) for trace in made] == [300] * 3


def test_a_context_that_leaves_no_room_for_a_chain_is_refused(load: Any, encode: Any) -> None:
    traces = load("traces")
    with pytest.raises(traces.TraceError, match="75 tokens"):
        traces.make_traces(1, 70, 5, seed=1, encode=encode)


def test_traces_are_kept_in_a_file_and_not_made_again(load: Any, encode: Any, tmp_path: Path) -> None:
    traces, path = load("traces"), tmp_path / "traces.json"
    made = traces.TraceStore(path, encode).get(4, 300, 50)
    calls: list[str] = []

    def counted(text: str) -> list[int]:
        calls.append(text)
        return encode(text)

    store = traces.TraceStore(path, counted)
    assert store.get(2, 300, 50) == made[:2]
    assert calls == [traces.SAMPLE]
    assert len(store.get(5, 300, 50)) == 5 and len(calls) > 1


def test_a_traces_file_of_another_tokenizer_or_a_broken_one_is_refused(
    load: Any, encode: Any, tmp_path: Path
) -> None:
    traces, path = load("traces"), tmp_path / "traces.json"
    traces.TraceStore(path, encode).get(1, 300, 50)
    with pytest.raises(traces.TraceError, match="tokenizer"):
        traces.TraceStore(path, lambda text: [1, 2, 3])
    data = json.loads(path.read_text())
    data["sets"][0]["traces"][0]["ids"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(traces.TraceError, match="299 tokens among those of 300"):
        traces.TraceStore(path, encode)
    path.write_text("nonsense")
    with pytest.raises(traces.TraceError, match="cannot read"):
        traces.TraceStore(path, encode)


# -- arithmetic of a cell


def stream(cell: ModuleType, events: list[tuple[float, int, int]], accepted: int = 0) -> Any:
    made = cell.Stream()
    for at, (now, tokens, verifications) in enumerate(events):
        meta: dict[str, Any] = {"completion_tokens": tokens, "cached_tokens": 3}
        if verifications:
            meta |= {"spec_verify_ct": verifications, "spec_num_correct_drafts": accepted}
        if at == len(events) - 1:
            meta["finish_reason"] = {"type": "length"}
        made.add(now, {"meta_info": meta, "output_ids": list(range(tokens))})
    return made


def test_a_window_counts_only_the_time_in_which_all_decode(load: Any) -> None:
    cell = load("cell")
    early = stream(cell, [(0.0, 1, 0), (1.0, 11, 0), (2.0, 21, 0)])
    late = stream(cell, [(1.0, 1, 0), (2.0, 11, 0), (3.0, 21, 0)])
    window = cell.measure([early, late])
    assert (window.seconds, window.tokens, window.requests) == (1.0, 20.0, 2)
    assert window.tokens_per_s == 20.0
    assert window.step_ms == pytest.approx(100.0)
    assert window.acceptance_length is None


def test_tokens_between_two_events_are_interpolated(load: Any) -> None:
    cell = load("cell")
    a = stream(cell, [(0.0, 1, 0), (10.0, 101, 0)])
    b = stream(cell, [(5.0, 1, 0), (15.0, 101, 0)])
    assert cell.measure([a, b]).tokens == pytest.approx(100.0)


def test_a_window_of_rounds(load: Any) -> None:
    cell = load("cell")
    # SGLang tells verifications and accepted drafts with the last event only.
    fast = stream(cell, [(0.0, 1, 0), (1.0, 7, 0), (2.0, 13, 2)], accepted=10)
    slow = stream(cell, [(0.0, 1, 0), (1.0, 4, 0), (2.0, 7, 0), (4.0, 13, 4)], accepted=8)
    window = cell.measure([fast, slow])
    assert (window.seconds, window.tokens) == (2.0, 18.0)
    assert window.verifications == pytest.approx(4.0)
    assert window.acceptance_length == pytest.approx(4.5)
    assert window.step_ms == pytest.approx(1000.0)


def test_the_clock_starts_after_the_lead(load: Any) -> None:
    cell = load("cell")
    one = stream(cell, [(0.0, 1, 0), (1.0, 9, 0), (2.0, 17, 0), (3.0, 25, 0)])
    assert cell.measure([one], lead=9).tokens == pytest.approx(16.0)
    with pytest.raises(cell.CellError, match="too few tokens"):
        cell.measure([one], lead=26)


def test_requests_that_did_not_decode_together_do_not_fit(load: Any) -> None:
    cell = load("cell")
    a, b = stream(cell, [(0.0, 1, 0), (1.0, 9, 0)]), stream(cell, [(1.5, 1, 0), (2.5, 9, 0)])
    with pytest.raises(cell.DoesNotFitError):
        cell.measure([a, b])


def test_a_stream_without_an_end_or_with_an_abort_is_no_measurement(load: Any) -> None:
    cell = load("cell")
    one = stream(cell, [(0.0, 1, 0), (1.0, 9, 0)])
    one.finished = False
    with pytest.raises(cell.CellError):
        cell.measure([one])
    event = {
        "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort", "message": "out of room"}}
    }
    with pytest.raises(cell.CellError, match="out of room"):
        one.add(2.0, event)


def test_a_cell_of_more_tokens_than_the_pool_or_more_requests_than_run_does_not_fit(load: Any) -> None:
    cell = load("cell")
    needed = cell.tokens_needed(48, 8192, 256)
    assert needed == 48 * (8192 + 256 + 64)
    cell.check_fit(48, 8192, 256, capacity=needed, max_requests=48)
    with pytest.raises(cell.DoesNotFitError, match="KV tokens"):
        cell.check_fit(48, 8192, 256, capacity=needed - 1, max_requests=48)
    with pytest.raises(cell.DoesNotFitError, match="47 requests"):
        cell.check_fit(48, 8192, 256, capacity=needed, max_requests=47)


# -- a sweep against a server that streams made-up tokens


class FakeServer:
    """Answers what a sweep asks of a server, in a thread. All prompts get the same tokens, four an event."""

    def __init__(self, model_path: str, flags: list[str], **more: Any) -> None:
        self.speculative, self.broken = "SPARSESPEC" in flags, "NGRAM" in flags

    def __enter__(self) -> FakeServer:
        if self.broken:
            raise ServerError("the server ended with exit status 1")
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.get("/server_info", self._info),
                web.get("/v1/loads", self._loads),
                web.post("/flush_cache", self._loads),
                web.post("/generate", self._generate),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        state = {"effective_max_running_requests_per_dp": 8}
        return web.json_response({"max_total_num_tokens": 1000, "internal_states": [state]})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"token_usage": 0.25, "num_running_reqs": 2}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["input_ids"] == [13]:
            return web.json_response({"error": "unlucky"}, status=400)
        reply = web.StreamResponse()
        await reply.prepare(request)
        wanted = body["sampling_params"]["max_new_tokens"]
        for tokens in [1, *range(4, wanted, 4), wanted]:
            meta: dict[str, Any] = {"completion_tokens": tokens, "cached_tokens": 5}
            if tokens == wanted:
                meta["finish_reason"] = {"type": "length"}
                if self.speculative:
                    meta |= {"spec_verify_ct": 10, "spec_num_correct_drafts": 30}
            event = {"text": "", "output_ids": list(range(tokens)), "meta_info": meta}
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.02)
        await reply.write(b"data: [DONE]\n\n")
        return reply


@pytest.fixture
def sweep(load: Any, encode: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("sweep")
    monkeypatch.setattr(module, "ServerProcess", FakeServer)
    monkeypatch.setattr(module, "find_device", lambda: "cpu")
    monkeypatch.setattr(module.traces, "load_encoder", lambda path: encode)
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    return module


def test_a_sweep_from_start_to_end(sweep: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    grid = ["--context", "200", "--concurrency", "2", "5", "--max-new-tokens", "32"]
    assert sweep.main(["--model-path", str(MODEL), "--out", str(out), *grid]) == 1  # NGRAM does not start
    (run,) = json.loads(out.read_text())["runs"]
    statuses = [(c["algorithm"], c["concurrency"], c["status"]) for c in run["cells"]]
    assert statuses == [
        ("plain", 2, "ok"),
        ("plain", 5, "does not fit"),
        ("sparsespec", 2, "ok"),
        ("sparsespec", 5, "does not fit"),
    ]
    assert {name: server["status"] for name, server in run["servers"].items()} == {
        "plain": "ok",
        "sparsespec": "ok",
        "ngram": "failed",
    }
    plain, sparse = run["cells"][0], run["cells"][2]
    assert 0 < plain["tokens_per_s"] < 2 * 32 / 0.1 and plain["acceptance_length"] is None
    assert sparse["acceptance_length"] == pytest.approx(4.0)
    assert sparse["step_ms"] == pytest.approx(1e3 * 2 * 4 / sparse["tokens_per_s"], rel=0.01)
    assert (sparse["kv_usage"], sparse["cached_tokens"], sparse["equal_to_plain"]) == (0.25, 10, 2)
    assert run["prompts"]["by_context"]["200"]["longest_shared_prefix"] < 40


def test_a_request_that_fails_or_a_cell_that_is_late_is_told(load: Any) -> None:
    cell = load("cell")

    def run(prompts: list[list[int]], timeout_s: float) -> None:
        more = {"new_tokens": 40, "lead": 0, "timeout_s": timeout_s}
        asyncio.run(cell.run_streams(server.url, prompts, **more))

    with FakeServer("m", []) as server:
        with pytest.raises(cell.CellError, match="unlucky"):
            run([[1], [13]], 20)
        with pytest.raises(cell.CellError, match="aborted"):
            run([[1]], 0.05)


# -- options and servers


def arguments(load: Any, *more: str) -> Any:
    return load("sweep_options").parse_args(["--model-path", str(MODEL), "--out", "x.json", *more])


def test_servers_differ_in_nothing_but_the_speculation(load: Any) -> None:
    args = arguments(
        load, "--server-flags", "--tp-size 2 --random-seed 9", "--concurrency", "3", "70",
        "--sparsespec-config", '{"stride": 5}', "--ngram-flags", "--speculative-num-draft-tokens 8",
    )  # fmt: skip
    flags = load("sweep_options").server_flags
    plain = flags("plain", args, "cuda")
    assert plain == ["--tp-size", "2", "--random-seed", "9", "--max-running-requests", "70"]
    sparse, ngram = flags("sparsespec", args, "cuda"), flags("ngram", args, "cuda")
    assert sparse[:6] == ngram[:6] == plain
    assert sparse[6:] == [
        "--speculative-algorithm",
        "SPARSESPEC",
        "--sparsespec-config",
        '{"stride": 5}',
    ]
    assert ngram[6:] == ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    assert flags("plain", args, "cpu")[-2:] == ["--dtype", "float32"]


def test_the_ablation_turns_on_one_thing_after_the_other(load: Any) -> None:
    args = arguments(
        load, "--sparsespec-config", '{"stride": 5}', "--algorithms", "naive,unified,delayed,adaptive"
    )
    flags = load("sweep_options").server_flags
    found = []
    for algorithm in args.algorithms:
        given = flags(algorithm, args, "cuda")
        config = json.loads(given[given.index("--sparsespec-config") + 1])
        assert config["stride"] == 5
        found.append((config["schedule"], "--disable-overlap-schedule" in given, config["adapt"]))
    assert found == [
        ("lockstep", True, "off"),
        ("unified", True, "off"),
        ("unified", False, "off"),
        ("auto", False, "on"),
    ]


def test_a_configuration_that_an_ablation_cannot_have_is_refused_before_a_server_starts(load: Any) -> None:
    with pytest.raises(ConfigError, match="draft_weights is 'int8'"):
        arguments(load, "--sparsespec-config", '{"draft_weights": "int8"}', "--algorithms", "plain,delayed")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--algorithms", "plain,eagle"], "eagle"),
        (["--server-flags", "--port 3"], "--port"),
        (["--server-flags", "--x 'y"], r"--server-flags: .*No closing quotation"),
        (["--context", "60"], "--context"),
        (["--context"], "nothing to measure"),
        (["--context", "--cells", "4x64"], "--cells: 64 tokens"),
        (["--swing", "9", "9"], "fewer and more"),
        (["--swing", "2", "9", "--swing-seconds", "3"], "two periods"),
        (["--swing", "2", "9", "--swing-period", "0"], "above 0"),
        (["--swing", "2", "9", "--swing-context", "64"], "--swing-context"),
    ],
)
def test_options_that_cannot_be_used_are_named(load: Any, options: list[str], named: str) -> None:
    with pytest.raises(load("sweep_options").UsageError, match=named):
        arguments(load, *options)


def test_single_cells_stand_beside_the_grid(load: Any) -> None:
    options = load("sweep_options")
    args = arguments(
        load, "--context", "200", "--concurrency", "1", "8", "--cells", "4x100", "70x200", "1x200"
    )
    assert options.grid_of(args) == [(100, 4), (200, 1), (200, 8), (200, 70)]
    flags = options.server_flags("plain", args, "cuda")
    assert flags[flags.index("--max-running-requests") + 1] == "70"
    only = arguments(load, "--context", "--concurrency", "99", "--cells", "4x100")
    assert options.grid_of(only) == [(100, 4)]
    assert "99" not in options.server_flags("plain", only, "cuda")


@pytest.mark.parametrize("given", ["8", "8x", "x8", "0x100", "8x0", "8x-1", "8 x 100", "eightx100"])
def test_a_cell_that_is_none_is_refused(load: Any, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(load, "--cells", given)
    assert f"such as 8x4096, got {given!r}" in capsys.readouterr().err


# -- a load that swings


def test_periods_of_few_and_of_many_are_told_apart(load: Any) -> None:
    swing = load("swing")
    plain = swing.figures([100, 1000, 120, 1100], 5.0)
    assert (plain["tokens_per_s"], plain["few"], plain["many"]) == (116.0, 22.0, 210.0)
    drafts = swing.figures([50, 2000, 60, 2200], 5.0)
    both = swing.figures([100, 1900, 115, 2100], 5.0)
    assert swing.share_of_the_better(both, [plain, drafts]) == pytest.approx(
        (21.5 + 400) / (22 + 420), abs=1e-4
    )
    assert swing.share_of_the_better(both, []) is None


def test_the_table_tells_what_share_of_the_better_fixed_servers_an_adaptive_one_reached(load: Any) -> None:
    def swing(algorithm: str, few: float, many: float) -> dict[str, Any]:
        return {"algorithm": algorithm, "context": 8192, "concurrency": 48, "few_requests": 2,
                "status": "ok", "tokens_per_s": few + many, "few": few, "many": many}  # fmt: skip

    runs = [
        run_of(swings=[swing("plain", 300.0, 2000.0)]),
        run_of(swings=[swing("sparsespec", 200.0, 3000.0)]),
    ]
    runs.append(run_of(swings=[swing("adaptive", 330.0, 2970.0)]))
    assert load("plot").text_table(runs).splitlines()[-1].split()[-1] == "1.000"


def test_a_server_runs_as_many_requests_as_the_swing_has(load: Any) -> None:
    args = arguments(load, "--context", "--swing", "2", "77")
    flags = load("sweep_options").server_flags("plain", args, "cuda")
    assert flags[flags.index("--max-running-requests") + 1] == "77"


# -- results files, tables, plots


def entry(algorithm: str, concurrency: int, speed: float | None, **more: Any) -> dict[str, Any]:
    base = {"algorithm": algorithm, "context": 8192, "concurrency": concurrency, "new_tokens": 256, "lead": 0}
    if speed is None:
        return {**base, "status": "does not fit", "reason": "too long"}
    return {**base, "status": "ok", "tokens_per_s": speed, "step_ms": 1.0, "kv_usage": 0.5, **more}


def run_of(*cells: dict[str, Any], gpu: str = "GPU, 1", swings: Any = ()) -> dict[str, Any]:
    machine, kinds = {"gpus": [gpu], "cpu": "x"}, {"cells": list(cells), "prompt_runs": [], "swings": swings}
    return {"model": "m", "machine": machine, "servers": {}, **kinds}


def test_a_results_file_keeps_every_run_and_is_whole_after_every_cell(load: Any, tmp_path: Path) -> None:
    results, path = load("results"), tmp_path / "sub" / "r.json"
    first = results.ResultFile(path, {"model": "a"})
    first.add("cells", entry("plain", 1, 10.0))
    assert json.loads(path.read_text())["runs"][0]["cells"][0]["tokens_per_s"] == 10.0
    results.ResultFile(path, {"model": "b"}).add("prompt_runs", {"algorithm": "plain"})
    runs = results.read(path)["runs"]
    assert [run["model"] for run in runs] == ["a", "b"]
    assert [len(run["cells"]) for run in runs] == [1, 0]
    assert not path.with_name("r.json.tmp").exists()


def test_a_file_that_is_no_results_file_is_not_overwritten(load: Any, tmp_path: Path) -> None:
    results, path = load("results"), tmp_path / "r.json"
    path.write_text('{"format": 99, "runs": []}')
    with pytest.raises(results.ResultsError, match="no results file"):
        results.ResultFile(path, {})
    assert json.loads(path.read_text())["format"] == 99


def test_a_run_says_what_it_ran_on(load: Any) -> None:
    header = load("results").header()
    assert set(header) == {"command", "started", "machine", "versions"}
    assert "python" in header["versions"]


def test_speed_up_is_against_plain_decoding_of_the_same_cell(load: Any) -> None:
    rows_of = load("plot").rows_of
    first = run_of(entry("plain", 1, 100.0), entry("sparsespec", 1, 150.0), entry("sparsespec", 16, 9.0))
    second = run_of(entry("plain", 1, 50.0), entry("sparsespec", 1, 150.0))
    third = run_of(entry("sparsespec", 1, 120.0))
    elsewhere = run_of(entry("sparsespec", 1, 120.0), gpu="GPU, 2")
    speedups = [row["speedup"] for row in rows_of([first, second, third, elsewhere])]
    assert speedups == [1.0, 1.5, None, 1.0, 3.0, 1.2, None]


def test_tables_show_what_does_not_fit(load: Any) -> None:
    text_table = load("plot").text_table
    run = run_of(entry("plain", 48, None), entry("sparsespec", 1, 1234.5, acceptance_length=5.25))
    run["prompt_runs"].append(
        {"algorithm": "plain", "status": "ok", "prompts": "p.jsonl", "concurrency": 4,
         "tokens_per_s": 10.0, "right": 3, "problems": 4}
    )  # fmt: skip
    plain, markdown = text_table([run]), text_table([run], markdown=True)
    assert "does not fit" in plain and "1,234.5" in plain and "5.25" in plain and "p.jsonl" in plain
    assert len({line.count("|") for line in markdown.split("\n\n")[0].splitlines()}) == 1


def test_the_plot_is_written(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "r.json"
    cells = [entry(name, n, speed * n) for n in (1, 4) for name, speed in (("plain", 10), ("sparsespec", 15))]
    path.write_text(json.dumps({"format": 1, "runs": [run_of(*cells)]}))
    assert (
        load("plot").main([str(path), "--png", str(tmp_path / "p.png"), "--markdown", str(tmp_path / "p.md")])
        == 0
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "speed-up" in (tmp_path / "p.md").read_text()


def test_the_plot_of_steps_has_a_bar_for_each_cell_and_server(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [entry(name, n, speed * n) for n in (8, 64) for name, speed in (("plain", 10), ("naive", 9))]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"format": 1, "runs": [run_of(*cells, entry("delayed", 64, 700.0))]}))
    assert load("plot").main([str(path), "--steps-png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_plots_say_what_they_need(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"format": 1, "runs": [run_of(entry("plain", 1, 10.0))]}))
    assert load("plot").main([str(path), "--png", str(tmp_path / "p.png")]) == 2
    said = capsys.readouterr()
    assert "10.0" in said.out and "pip install matplotlib" in said.err


def test_answers_are_judged_by_the_reasoner_s_checker(load: Any) -> None:
    from sglang_sparsespec._client import Outcome, Problem

    good = Outcome(Problem("p", "42", "prog"), state="done", text="</think>\nAnswer: 42<|im_end|>", tokens=90)
    good.verifications, good.accepted_drafts = 10, 50
    bad = Outcome(Problem("p", "7", "walk"), state="failed", text="Answer: 7", error="cut off", tokens=10)
    found = load("run_prompts").summarise([good, bad], 2.0)
    assert (found["status"], found["reason"], found["right"], found["problems"]) == (
        "failed",
        "cut off",
        1,
        2,
    )
    assert found["tokens_per_s"] == 50.0 and found["acceptance_length"] == 6.0


def test_rounds_of_a_cell_are_the_difference_of_two_server_states(load: Any) -> None:
    between = load("sweep").rounds_between
    before = {"rounds": 10, "verifications": 20, "accepted_tokens": 80}
    after = {"rounds": 15, "verifications": 30, "accepted_tokens": 130}
    assert between(before, after) == {"rounds": 5, "server_acceptance_length": 6.0}
    before["rounds_by_drafts"] = {"0": 4, "6": 9}
    after |= {"rounds_by_drafts": {"0": 4, "3": 1, "6": 14}, "unified_rounds": 2, "eager_micro_steps": 0}
    assert between(before, after) == {"rounds": 5, "server_acceptance_length": 6.0, "unified_rounds": 2,
                                      "rounds_by_drafts": {"3": 1, "6": 5}}  # fmt: skip
    assert between({}, {}) == {}


# -- kernels


def test_bytes_of_a_shape(load: Any) -> None:
    shape = load("shapes").Shape(48, 8192)
    assert shape.name == "48x8k" and shape.keys == 8201
    assert shape.attention_bytes == 48 * 8201 * 4096
    assert shape.score_bytes == 48 * 8201 * 2048 + 48 * 8192 * 2
    assert shape.budget == 410 + 4
    assert [load("shapes").draft_name(draft) for draft in load("shapes").DRAFT] == [
        "43x410",
        "48x820",
        "114x410",
    ]


def test_scores_of_a_key_cannot_overflow(load: Any) -> None:
    shapes = load("shapes")
    for shape in shapes.VERIFY:
        assert (shape.queries * shape.heads) << shapes.score_shift(shape) < 2**31


def test_rows_take_other_slots_at_each_launch_and_match_the_reference(load: Any, one_thread: None) -> None:
    torch = pytest.importorskip("torch")
    rows, shape = load("rows"), load("shapes").SMOKE_VERIFY[0]
    pool = rows.KvPool(2048, shape.kv_heads, shape.dim, torch.device("cpu"), torch.float32)
    made = rows.make_rows(shape, pool)
    slots = torch.stack(made.tables)[..., : shape.keys].flatten()
    assert len(made.tables) == 10 and len(slots.unique()) == len(slots) and int(slots.min()) > 0
    out = torch.cat([rows.reference(made, row)[0] for row in range(shape.rows)])
    rows.check_output(made, out)
    with pytest.raises(ValueError, match="wrong result"):
        rows.check_output(made, out + 0.1)
    with pytest.raises(ValueError, match="slots"):
        rows.make_rows(load("shapes").VERIFY[0], pool)


def report() -> dict[str, Any]:
    timed = {"status": "ok", "us": 20.0, "roofline_us": 10.0, "tb_per_s": 2.1, "percent_of_read": 50.0}
    base = {"group": "score", "shape": "5x8k", "bytes": 1000}
    return {
        "machine": {"gpus": ["GPU"], "cpu": "x"},
        "bandwidth": {"read": 4.2e12},
        "results": [
            {**base, "kernel": "ours", **timed},
            {**base, "kernel": "other", "status": "skipped", "reason": "not installed"},
            {**base, "kernel": "small", "group": "round", **timed, "bytes": 0},
        ],
    }


def test_the_kernel_table_and_plot_show_rooflines_and_what_was_skipped(load: Any, tmp_path: Path) -> None:
    kernel_report = load("kernel_report")
    table = kernel_report.text_table(report())
    assert "50%" in table and "skipped" in table
    assert "not installed" in kernel_report.line_of(report()["results"][1])
    assert (
        len({line.count("|") for line in kernel_report.text_table(report(), markdown=True).splitlines()}) == 1
    )
    pytest.importorskip("matplotlib")
    kernel_report.draw(report(), tmp_path / "k.png")
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_is_missing_or_fails_does_not_end_the_others(load: Any) -> None:
    torch = pytest.importorskip("torch")
    bench, attention = load("bench"), load("attention")

    def raising(error: Exception) -> Any:
        def make() -> Any:
            raise error

        return attention.Case("g", "s", "k", 8, make)

    def status(case: Any) -> tuple[str, str]:
        found = bench.time_case(case, torch.device("cpu"), 1e9)
        return found["status"], found.get("reason", "")

    assert status(raising(ImportError("\nno such thing\nmore"))) == ("skipped", "no such thing")
    assert status(raising(attention.NotHereError("no GPU"))) == ("skipped", "no GPU")
    assert status(raising(ValueError("bad"))) == ("failed", "ValueError: bad")
    assert status(attention.Case("g", "s", "k", 8, lambda: lambda i: None))[0] == "ok"


def test_the_round_kernels_are_given_the_buffers_that_they_take(load):
    import torch
    from sgl_kernel_ext import rounds_reference

    made = load("selection").Round(load("shapes").Shape(rows=2, context=64), torch.device("cpu"), 1)
    rounds_reference.prepare(made.step, made.state, page_width=made.draft_pages.shape[-1], capacity=1000)
    assert made.step.first.tolist() == [64, 64]
    rounds_reference.finish_greedy(made.step, made.state, made.picked, made.out_tokens, made.out_len)
    assert (made.out_len > 0).all(), "every slot is taken by a request"


def test_planning_is_timed_part_by_part(load: Any) -> None:
    times = load("planning").measure(3, 4, rounds=20)
    assert list(times) == ["budgets", "load", "choice", "plan", "counts", "outcome", "learning", "all"]
    assert all(us > 0 for us in times.values())
    assert times["all"] > times["plan"]
