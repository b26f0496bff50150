"""The demo and its server process against a small fake server: no model, no SGLang."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sglang_sparsespec import demo
from sglang_sparsespec._client import (
    Outcome,
    Problem,
    PromptsError,
    answer_all,
    answer_of,
    apply_event,
    load_problems,
    parse_event,
)
from sglang_sparsespec._demo_report import Run, faults, identical, result_table
from sglang_sparsespec._server import ServerError, ServerProcess, free_port
from sglang_sparsespec.config import CONFIG_ENV, ConfigError

FAKE_SERVER = """
import json, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode = sys.argv[1]
port = int(sys.argv[sys.argv.index("--port") + 1])
print("fake server:", *sys.argv[1:], flush=True)
if mode == "dies":
    print("the reason it died", flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
                              "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
    print("child", child.pid, flush=True)
if mode == "hangs":
    time.sleep(60)
speculative = "--speculative-algorithm" in sys.argv


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "refuses":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such thing")
            return
        self.send_response(200)
        self.end_headers()
        words = ["thinking", "about", "it", "Answer:", "42" if mode != "differs" or speculative else "41"]
        for n in range(1, 6):
            last = n == 5
            meta = {"completion_tokens": n, "finish_reason": {"type": "stop"} if last else None}
            if speculative and last:
                meta |= {"spec_verify_ct": 2, "spec_num_correct_drafts": 3}
            event = {"text": " ".join(words[:n]), "output_ids": list(range(n)), "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")


ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., ServerProcess]:
    """Makes a ServerProcess of the fake server: modes works, dies, hangs, stubborn, refuses, differs."""
    script = tmp_path / "fake_server.py"
    script.write_text(FAKE_SERVER)

    def make(mode: str, args: list[str] | None = None, **options: Any) -> ServerProcess:
        options = {"log_path": tmp_path / f"{mode}.log", "timeout_s": 30, **options}
        return ServerProcess("model", args or [], command=[sys.executable, str(script), mode], **options)

    return make


def runs(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- the server process


def test_a_server_is_ready_inside_the_block_and_gone_after_it(fake: Callable[..., ServerProcess]) -> None:
    with fake("works") as server:
        pid = server.pid
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert f"--host 127.0.0.1 --port {server.port}" in server.log_path.read_text()
    assert not runs(pid)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


def test_a_server_that_dies_shows_its_log(fake: Callable[..., ServerProcess]) -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)exit status 3 before it was ready.*the reason it died"),
        fake("dies"),
    ):
        pass


def test_a_server_that_hangs_is_stopped_in_time(fake: Callable[..., ServerProcess]) -> None:
    server = fake("hangs", timeout_s=2)
    with pytest.raises(ServerError, match=r"(?s)not ready after 2 s.*fake server:"), server:
        pass
    assert server._process is None


def test_no_child_outlives_a_stubborn_server(fake: Callable[..., ServerProcess]) -> None:
    with fake("stubborn", stop_timeout_s=0.5) as server:
        leader = server.pid
        child = int(server.log_path.read_text().split("child ")[1].split()[0])
        assert runs(child)
    deadline = time.monotonic() + 5
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(leader)
    assert not runs(child)


def test_the_own_log_is_kept_only_after_an_error(fake: Callable[..., ServerProcess]) -> None:
    with fake("works", log_path=None) as server:
        assert server.log_path.exists()
    assert not server.log_path.exists()
    broken = fake("dies", log_path=None)
    with pytest.raises(ServerError), broken:
        pass
    assert broken.log_path.exists()
    broken.log_path.unlink()


def test_a_free_port_is_free() -> None:
    assert 1024 <= free_port() < 65536


# --- problems, answers and events


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nAnswer: 1\n</think>\nAnswer: laso 18", "laso 18"),
        ("Answer: 42<|im_end|>", "42"),
        ("Answer:  42 \nThank you", "42"),
        ("the answer is 42", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "holds no problem"),
        ("{}\n", 'line 1: needs an object with a non-empty text under "prompt"'),
        ('{"prompt": "a"}\n\n{"prompt": ', "line 3: not JSON"),
        ('{"prompt": "a", "answer": [1]}', '"answer" must be a text or a number'),
        ('["a"]', "needs an object"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path: Path, content: str, error: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(PromptsError) as raised:
        load_problems(path)
    assert error in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_prompt_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="No such file"):
        load_problems(tmp_path / "none.jsonl")


def test_answers_are_optional_and_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": 7, "family": "sum"}\n')
    assert load_problems(path) == [Problem("a"), Problem("b", "7", "sum")]
    assert Outcome(Problem("a"), state="done").correct is None


def test_the_bundled_problems_are_two_of_every_family() -> None:
    problems = load_problems(demo.BUNDLED_PROMPTS)
    families = [problem.family for problem in problems]
    assert len(problems) == 14
    assert {families.count(family) for family in families} == {2}
    assert len(set(families)) == 7
    assert all(problem.answer for problem in problems)


def test_events_of_a_stream() -> None:
    assert parse_event(b"\n") is None
    assert parse_event(b"data: [DONE]\n") is None
    with pytest.raises(ValueError, match="too long"):
        parse_event(b'data: {"error": {"message": "too long"}}\n')
    aborted = {"completion_tokens": 3, "finish_reason": {"type": "abort", "message": "out of memory"}}
    with pytest.raises(ValueError, match="out of memory"):
        apply_event(Outcome(Problem("a")), {"text": "", "meta_info": aborted})


def answer(server: ServerProcess, problems: list[Problem]) -> list[Outcome]:
    outcomes = [Outcome(problem) for problem in problems]
    ids = [[1, 2] for _ in problems]
    asyncio.run(answer_all(server.url, ids, outcomes, max_tokens=8, concurrency=2))
    return outcomes


def test_a_stream_fills_an_outcome(fake: Callable[..., ServerProcess]) -> None:
    with fake("works", ["--speculative-algorithm", "SPARSESPEC"]) as server:
        right, wrong, shown = answer(server, [Problem("a", "42"), Problem("b", "43"), Problem("c")])
    assert (right.state, right.tokens, right.token_ids) == ("done", 5, [0, 1, 2, 3, 4])
    assert (right.verifications, right.accepted_drafts, right.finish_reason) == (2, 3, "stop")
    assert (right.correct, wrong.correct, shown.correct) == (True, False, None)


def test_a_refused_request_is_a_failure_and_not_a_crash(fake: Callable[..., ServerProcess]) -> None:
    with fake("refuses") as server:
        (outcome,) = answer(server, [Problem("a", "42")])
    assert outcome.state == "failed"
    assert outcome.error == "HTTP 400: no such thing"
    assert outcome.correct is False


# --- what is reported


def run_of(label: str, *texts: str, verifications: int | None = 2, state: str = "done") -> Run:
    outcomes = [
        Outcome(
            Problem("p", "42"),
            state=state,
            text=text,
            tokens=10,
            verifications=verifications,
            accepted_drafts=None if verifications is None else 7,
        )
        for text in texts
    ]
    return Run(label, outcomes, seconds=2.0)


def judge(spec: Run, plain: Run | None, *, bundled: bool = True) -> list[str]:
    return faults(spec, plain, bundled_prompts=bundled, bundled_model=True)


def test_figures_of_a_run() -> None:
    run = run_of("spec", "Answer: 42", "Answer: 41")
    assert (run.correct, run.judged, run.tokens, run.tokens_per_second) == (1, 2, 20, 10.0)
    assert (run.acceptance_length, run.tokens_per_full_forward) == (4.5, 5.0)
    plain = run_of("plain", "Answer: 42", verifications=None)
    assert (plain.acceptance_length, plain.tokens_per_full_forward) == (None, None)


def test_faults_decide_the_exit_status() -> None:
    right, wrong = "Answer: 42", "Answer: 41"
    plain = run_of("plain", right, right, verifications=None)
    assert judge(run_of("spec", right, right), plain) == []
    assert "1 of 2 texts differ" in judge(run_of("spec", right, wrong), plain)[0]
    assert "never verified" in judge(run_of("spec", right, right, verifications=None), plain)[0]
    assert "Only 1 of 2" in judge(run_of("spec", right, wrong), None)[0]
    assert "request failed" in judge(run_of("spec", right, right, state="failed"), plain)[0]
    assert judge(run_of("spec", right, wrong), plain, bundled=False) == []


def test_failed_requests_are_never_identical() -> None:
    failed = run_of("spec", "", state="failed")
    assert identical(failed, failed) == [False]


def test_the_result_table_holds_both_runs() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(
        result_table(run_of("spec", "Answer: 42"), run_of("plain", "Answer: 42", verifications=None))
    )
    for text in ("1 of 1", "4.50", "5.00", "speed ratio", "same text"):
        assert text in out.getvalue()


# --- the command line


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--model-path", "/no/such/model"], "there is no folder"),
        (["--json", "/no/such/folder/out.json"], "does not exist"),
        (["--server-arg=--port 3"], "--port is set by the demo itself"),
        (["--server-arg=--host=0.0.0.0"], "--host is set by the demo itself"),
        (["--prompts", "/no/such/file"], "No such file"),
        (["--config", '{"budget_rato": 0.1}'], "budget_ratio"),
        (["--k", "99"], "stride"),
    ],
)
def test_bad_options_are_named_before_a_server_starts(argv: list[str], error: str) -> None:
    with pytest.raises((demo.UsageError, PromptsError, ConfigError)) as raised:
        demo.parse_args(argv)
    assert error in str(raised.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(demo.UsageError, match=r"no config\.json"):
        demo.parse_args(["--model-path", str(tmp_path)])


@pytest.mark.parametrize("option", ["--concurrency", "--max-tokens"])
def test_counts_start_at_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args([option, "0"])
    assert "from 1 up" in capsys.readouterr().err


def test_the_demo_shows_drafts_whatever_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    assert (
        demo.make_server(demo.parse_args([]), "cuda", speculative=True).env[CONFIG_ENV] == '{"adapt": "off"}'
    )
    monkeypatch.setenv(CONFIG_ENV, '{"stride": 3}')
    assert CONFIG_ENV not in demo.make_server(demo.parse_args([]), "cuda", speculative=True).env


def test_servers_differ_in_nothing_but_the_speculation() -> None:
    args = demo.parse_args(["--k", "4", "--config", '{"sink": 8}', "--server-arg=--tp-size 2"])
    spec, plain = (demo.make_server(args, "cpu", speculative=s) for s in (True, False))
    assert plain.args == ["--tp-size", "2", "--dtype", "float32"]
    assert spec.args == [*plain.args, "--speculative-algorithm", "SPARSESPEC", "--speculative-num-steps", "4"]
    assert spec.env == {**plain.env, CONFIG_ENV: '{"sink": 8}'}
    assert demo.make_server(args, "cuda", speculative=False).args == ["--tp-size", "2"]


@pytest.mark.parametrize(("mode", "status"), [("works", 0), ("differs", 1), ("refuses", 1), ("dies", 1)])
def test_the_whole_demo(
    fake: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    status: int,
) -> None:
    prompts = tmp_path / "bundled.jsonl"
    prompts.write_text('{"prompt": "a", "answer": "42", "family": "sum"}\n' * 3)

    def make(args: Any, device: str, *, speculative: bool) -> ServerProcess:
        return fake(mode, ["--speculative-algorithm", "SPARSESPEC"] if speculative else [])

    monkeypatch.setattr(demo, "BUNDLED_PROMPTS", prompts)
    monkeypatch.setattr(demo, "make_server", make)
    monkeypatch.setattr(demo, "encode_prompts", lambda problems, model: [[1]] * len(problems))
    monkeypatch.setattr(demo, "find_device", lambda: "cpu")
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    out = tmp_path / "out.json"
    assert demo.main(["--json", str(out)]) == status
    printed = capsys.readouterr()
    if mode == "dies":
        assert "the reason it died" in printed.err
        return
    report = json.loads(out.read_text())
    assert bool(report["faults"]) is (status == 1)
    if mode == "works":
        assert report["identical"] == 3
        assert report["speculation"]["acceptance_length"] == 2.5
        assert "Speed on a CPU is not the point" in " ".join(printed.out.split())
        assert "3/3 sum" in printed.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_servers(tmp_path: Path, number: signal.Signals) -> None:
    fake_server = tmp_path / "fake_server.py"
    fake_server.write_text(FAKE_SERVER)
    driver = tmp_path / "driver.py"
    driver.write_text(f'''
import signal, sys, time
from sglang_sparsespec import demo
from sglang_sparsespec._server import ServerProcess

# As in a terminal: where this test runs in the background, it inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def run(args, console):
    command = [sys.executable, {str(fake_server)!r}, "works"]
    with ServerProcess("m", command=command, log_path="{tmp_path}/log") as server:
        print(server.pid, flush=True)
        time.sleep(60)

demo.demo = run
sys.exit(demo.main([]))
''')
    argv = [sys.executable, str(driver)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server_pid = int(process.stdout.readline())
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the servers are ended" in errors
    assert not runs(server_pid)
