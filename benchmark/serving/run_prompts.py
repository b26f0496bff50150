"""A prompts file from start to end: tokens/s of all requests together, and how many answers are right."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sparsespec._client import Outcome, Problem, answer_all, encode_prompts

if TYPE_CHECKING:
    from rich.progress import Progress

REASONER = Path(__file__).parents[1] / "reasoner"


def summarise(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Figures of a run: right answers by benchmark/reasoner's checker, tokens/s, acceptance length."""
    if str(REASONER) not in sys.path:
        sys.path.append(str(REASONER))
    from check import is_correct

    done = [outcome for outcome in outcomes if outcome.state == "done"]
    right = [o for o in done if o.problem.answer is not None and is_correct(o.text, o.problem.answer)]
    tokens = sum(outcome.tokens for outcome in outcomes)
    verified = [outcome for outcome in done if outcome.verifications]
    verifications = sum(outcome.verifications or 0 for outcome in verified)
    accepted = sum(outcome.accepted_drafts or 0 for outcome in verified)
    return {
        "status": "ok" if len(done) == len(outcomes) else "failed",
        "reason": next((outcome.error for outcome in outcomes if outcome.error), ""),
        "problems": len(outcomes),
        "right": len(right),
        "right_by_family": dict(Counter(outcome.problem.family for outcome in right)),
        "unfinished": sum(outcome.finish_reason == "length" for outcome in done),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 2),
        "retractions": sum(outcome.retractions for outcome in outcomes),
        "acceptance_length": round(1 + accepted / verifications, 3) if verifications else None,
    }


def run_prompts(
    url: str,
    model_path: str,
    problems: Sequence[Problem],
    *,
    concurrency: int,
    max_tokens: int,
    timeout_s: float,
    progress: Progress,
) -> dict[str, Any]:
    """Answer all problems at temperature 0, `concurrency` at a time. Raises TimeoutError when late."""
    ids = encode_prompts(problems, model_path)
    outcomes = [Outcome(problem) for problem in problems]
    task = progress.add_task("answers", total=len(problems))

    def show(outcome: Outcome) -> None:
        progress.update(task, completed=sum(o.state in ("done", "failed") for o in outcomes))

    async def run() -> float:
        async with asyncio.timeout(timeout_s):
            return await answer_all(
                url, ids, outcomes, max_tokens=max_tokens, concurrency=concurrency, on_change=show
            )

    try:
        return summarise(outcomes, asyncio.run(run()))
    except TimeoutError:
        raise TimeoutError(f"the prompts file was not done after {timeout_s:.0f} s.") from None
    finally:
        progress.remove_task(task)
