"""Every serving figure in one sitting on one GPU, the most important first, and a report of them.

    cd benchmark/serving
    python figures.py --model-path DIR --out figures --budget-s 1700
    python figures.py --out figures --report
    python figures.py --model-path DIR --out try --scale small    # on a CPU, to see that it works

One run of sweep.py for each server: plain decoding, rounds that adapt, rounds of a fixed length, the steps of
the ablation, and a prompts file from start to end. Each writes OUT/NAME.json after every cell, so that it can
be cut off at any time. The same command again measures what is missing: a server whose file is complete is
skipped, another one measures the rest. When --budget-s is over, what still runs is ended and the report made.

The report is printed and written to OUT/report.md, with plots beside it where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import figures_plan as plans
import figures_report
import plot
import results
import sweep_options
import traces
from figures_plan import SCALES, Entry
from sglang_sparsespec._client import PromptsError
from sglang_sparsespec.config import ConfigError
from sweep_options import UsageError

SWEEP = Path(__file__).with_name("sweep.py")
STOP_S = 60.0  # until a sweep that is told to end has ended its server


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options and check what needs no file of --out. Raises UsageError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-path", "--model", help="model folder or name, the same for all servers")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the results files; made when missing",
    )
    add(
        "--budget-s",
        type=_seconds,
        help="seconds for everything; a server that would take longer is not started",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="only these servers (a wrong name lists all)")
    add(
        "--scale",
        choices=list(SCALES),
        default="full",
        help="small: tiny loads, to try this on a CPU (ten minutes)",
    )
    add(
        "--traces", type=Path, metavar="FILE", help="prompts of sweep.py, made when missing (OUT/traces.json)"
    )
    add("--server-flags", metavar="FLAGS", help="flags of every server instead of the scale's own")
    add(
        "--share-servers",
        action="store_true",
        help="measure the prompts file on the servers plain and adaptive: two starts less, but the fixed "
        "rounds and the ablation come later",
    )
    add("--report", action="store_true", help="measure nothing: only the report, of the files that are there")
    args = parser.parse_args(argv)
    if not args.report and not args.model_path:
        raise UsageError("--model-path is missing: give a model's folder or name, or --report.")
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out: {str(args.out)!r} is no folder; name one, or a new one.")
    if args.report and not args.out.exists():
        raise UsageError(f"--report: there is no folder {str(args.out)!r}; give the --out of a run.")
    model = args.model_path or ""
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise UsageError(f"--model-path: there is no folder {model!r}; give a model's folder or name.")
    args.traces = args.traces or args.out / "traces.json"
    if args.server_flags is None:
        args.server_flags = SCALES[args.scale].server_flags
    return args


def _seconds(text: str) -> float:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of seconds from 1 up, got {text!r}")
    return float(text)


class Figures:
    """The servers of a plan, one after the other, each measured by a sweep.py of its own.

    Args:
        args: of `parse_args`.
        command: how sweep.py is called, for tests.

    Raises:
        UsageError, ConfigError, PromptsError, TraceError, ResultsError: something that was given, or a file
            in the folder, cannot be used. No server was started.
    """

    def __init__(self, args: argparse.Namespace, command: Sequence[str] | None = None) -> None:
        self.args, self.scale = args, SCALES[args.scale]
        self.began = time.monotonic()
        everything = plans.entries(self.scale, share_servers=args.share_servers)
        self.plan = plans.chosen(everything, args.only)
        # Names of both kinds of plan: the report shows what is there.
        others = plans.entries(self.scale, share_servers=not args.share_servers)
        self.names = list(dict.fromkeys(entry.name for entry in (*everything, *others)))
        self._command = list(command or (sys.executable, os.path.relpath(SWEEP)))
        files = self.files()
        if not args.report:
            machine = results.machine()
            for entry in self.plan:
                self._check(entry, files.get(entry.name, []), machine)
            if args.traces.exists():
                traces.TraceStore(args.traces, traces.load_encoder(args.model_path))

    def files(self) -> dict[str, list[dict[str, Any]]]:
        """The runs of each results file that is in the folder."""
        return plans.read_runs(self.args.out, self.names)

    def run(self) -> None:
        """Measure what is missing, until the budget does not allow another server."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        for at, entry in enumerate(self.plan):
            files = self.files()
            left = plans.remaining(entry, files.get(entry.name, ()))
            if left.is_empty:
                _say(f"{entry.name}: complete, skipped.")
                continue
            expected = plans.expected_s(left, self.scale, files)
            if expected > self._time_left():
                rest = ", ".join(later.name for later in self.plan[at:])
                _say(
                    f"{entry.name} is expected to take {expected:.0f} s, {self._time_left():.0f} s of "
                    f"--budget-s are left. Not started: {rest}."
                )
                return
            _say(f"{entry.name}: {left}, expected to take {expected:.0f} s.")
            began = time.monotonic()
            if not self._sweep(left):
                _say(f"{entry.name}: ended, because --budget-s is over.")
                return
            _say(f"{entry.name}: took {time.monotonic() - began:.0f} s.")

    def report(self) -> bool:
        """Print and write the report and the plots; returns whether everything planned is measured."""
        files = self.files()
        text = figures_report.report(files, self.scale, self.plan)
        _say(text)
        (self.args.out / "report.md").write_text(text + "\n", encoding="utf-8")
        try:
            drawn = figures_report.draw(files, self.args.out, self.scale)
            _say("".join(f"\n{path}" for path in drawn))
        except plot.PlotError as error:
            _say(f"\nNothing was drawn: {error}.")
        return all(plans.remaining(entry, files.get(entry.name, ())).is_empty for entry in self.plan)

    def _options(self, entry: Entry) -> list[str]:
        args = self.args
        return plans.sweep_options(
            entry,
            self.scale,
            model=args.model_path,
            out=args.out,
            traces=args.traces,
            server_flags=args.server_flags,
        )

    def _check(self, entry: Entry, runs: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
        """Refuse what sweep.py would refuse, and to add to figures of something else."""
        given = vars(sweep_options.parse_args(self._options(entry)))
        wanted = {"model": Path(self.args.model_path).name, "machine": machine}
        wanted |= {name: given[name] for name in plans.SETTINGS}
        for run in runs:
            found = {"model": run["model"], "machine": run["machine"]}
            found |= {name: run["options"].get(name) for name in plans.SETTINGS}
            if changed := [name for name in wanted if found[name] != wanted[name]]:
                name = changed[0]
                raise UsageError(
                    f"--out: {str(plans.file_of(self.args.out, entry.name))!r} was measured with {name} "
                    f"{json.dumps(found[name])}, now it is {json.dumps(wanted[name])}. "
                    "Give another --out, or what was given then."
                )

    def _time_left(self) -> float:
        if self.args.budget_s is None:
            return float("inf")
        return self.args.budget_s - (time.monotonic() - self.began)

    def _sweep(self, entry: Entry) -> bool:
        """Run sweep.py; false where the budget was over before it ended."""
        # In a session of its own, or Ctrl-C would reach it a second time while it ends its server.
        process = subprocess.Popen([*self._command, *self._options(entry)], start_new_session=True)
        try:
            left = self._time_left()
            process.wait(None if left == float("inf") else max(0.0, left))
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(text: str) -> None:
    print(text, flush=True)


def _terminated(number: int, frame: object) -> NoReturn:
    # Raised in the main thread, so that the sweep is ended and the report is made.
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where everything planned is measured, 1 where not, 2 for bad input, 130 when stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        figures = Figures(parse_args(argv))
        stopped = False
        if not figures.args.report:
            try:
                figures.run()
            except KeyboardInterrupt:
                stopped = True
                _say("Stopped; what was measured is in the results files.")
        complete = figures.report()
        return 130 if stopped else 0 if complete or figures.args.report else 1
    except (UsageError, PromptsError, ConfigError, traces.TraceError, results.ResultsError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
