"""What the demo shows: a run's figures, what went wrong in it, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_sparsespec._client import Outcome


@dataclass(frozen=True)
class Run:
    """One server's answers to all problems, in the order of the problems."""

    label: str
    outcomes: list[Outcome]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(out.tokens for out in self.outcomes)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def failed(self) -> list[Outcome]:
        return [out for out in self.outcomes if out.state != "done"]

    @property
    def judged(self) -> int:
        """Problems that carry an answer."""
        return sum(out.correct is not None for out in self.outcomes)

    @property
    def correct(self) -> int:
        return sum(out.correct is True for out in self.outcomes)

    @property
    def verifications(self) -> int:
        return sum(out.verifications or 0 for out in self.outcomes)

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafts + 1, averaged over all verifications; None when the server reports none."""
        if not self.verifications or any(out.accepted_drafts is None for out in self.outcomes):
            return None
        return 1 + sum(out.accepted_drafts or 0 for out in self.outcomes) / self.verifications

    @property
    def tokens_per_full_forward(self) -> float | None:
        """Output tokens for each full-attention forward of a request; None when nothing was verified."""
        return self.tokens / self.verifications if self.verifications else None

    def asdict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "correct": self.correct,
            "judged": self.judged,
            "failed": len(self.failed),
            "verifications": self.verifications,
            "acceptance_length": self.acceptance_length,
            "tokens_per_full_forward": self.tokens_per_full_forward,
            "requests": [out.asdict() for out in self.outcomes],
        }


def identical(one: Run, other: Run) -> list[bool]:
    """For each problem, whether both runs finished it with the same tokens and the same text."""
    return [
        a.state == b.state == "done" and (a.token_ids, a.text) == (b.token_ids, b.text)
        for a, b in zip(one.outcomes, other.outcomes, strict=True)
    ]


def faults(spec: Run, plain: Run | None, *, bundled_prompts: bool, bundled_model: bool) -> list[str]:
    """What went otherwise than it must, one sentence each; empty when the demo succeeded."""
    found = []
    for run in (spec, plain):
        for out in run.failed if run else ():
            found.append(f"{run.label if run else ''}: a {out.problem.family} request failed: {out.error}")
    if bundled_prompts and not spec.verifications and not spec.failed:
        found.append(
            "The server with SPARSESPEC never verified a draft: it decoded plainly. "
            "Look at its log with --log-dir."
        )
    if bundled_prompts and plain and not all(same := identical(spec, plain)):
        found.append(f"{same.count(False)} of {len(same)} texts differ from those without speculation.")
    if (
        bundled_prompts
        and plain
        and [o.correct for o in spec.outcomes] != [o.correct for o in plain.outcomes]
    ):
        found.append(f"{spec.correct} answers are right with speculation, {plain.correct} without.")
    if bundled_prompts and bundled_model and not plain and spec.correct < spec.judged:
        found.append(f"Only {spec.correct} of {spec.judged} answers are right; this model solves them all.")
    return found


def mark(outcome: Outcome) -> str:
    """State of a problem in a word: waiting, running, failed, right, wrong, or done without a judgement."""
    if outcome.state != "done" or outcome.correct is None:
        return outcome.state
    return "right" if outcome.correct else "wrong"


COLOURS = {"waiting": "dim", "running": "cyan", "failed": "red", "wrong": "red", "right": "green"}


def progress_table(label: str, outcomes: Sequence[Outcome]) -> Table:
    done = sum(out.state in ("done", "failed") for out in outcomes)
    table = Table(title=f"{label}: {done} of {len(outcomes)} problems", title_justify="left")
    for name in ("#", "tokens", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("family")
    table.add_column("state")
    for at, out in enumerate(outcomes, 1):
        colour = COLOURS.get(mark(out), "white")
        state = f"[{colour}]{mark(out)}[/]"
        table.add_row(
            str(at), str(out.tokens or ""), f"{out.rate:.1f}" if out.tokens else "", out.problem.family, state
        )
    return table


def result_table(spec: Run, plain: Run | None) -> Table:
    def ratio(value: float | None) -> str:
        return "not reported" if value is None else f"{value:.2f}"

    table = Table(title="Result", title_justify="left")
    table.add_column("")
    table.add_column(spec.label, justify="right")
    rows = [
        ["answers right", f"{spec.correct} of {spec.judged}"],
        ["output tokens", str(spec.tokens)],
        ["acceptance length (accepted drafts + 1)", ratio(spec.acceptance_length)],
        ["tokens per full-attention forward", ratio(spec.tokens_per_full_forward)],
        ["tokens/s, all requests together", f"{spec.tokens_per_second:.1f}"],
    ]
    if plain:
        table.add_column(plain.label, justify="right")
        cells = [f"{plain.correct} of {plain.judged}", str(plain.tokens), "-", "1.00"]
        for row, cell in zip(rows, [*cells, f"{plain.tokens_per_second:.1f}"], strict=True):
            row.append(cell)
        same = identical(spec, plain)
        rows.append(["same text as without speculation", f"{sum(same)} of {len(same)}", ""])
        if plain.tokens_per_second:
            rows.append(["speed ratio", f"{spec.tokens_per_second / plain.tokens_per_second:.2f}", "1.00"])
    for row in rows:
        table.add_row(*row)
    return table


def show_texts(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the text of every problem that carries no answer to judge it by."""
    for out in outcomes:
        if out.problem.answer is None and out.state == "done":
            console.rule(out.problem.prompt[:70].replace("\n", " ").replace("[", "\\["), align="left")
            console.print(out.text, markup=False, highlight=False)
