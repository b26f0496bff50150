"""Problems, and a streaming client of a server's /generate that measures what each answer cost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ANSWER = re.compile(r"Answer:[ \t]*([^\n]+?)[ \t]*(?:<\||\n|$)")
STREAM_INTERVAL = 8


class PromptsError(ValueError):
    """A prompts file that cannot be used. The text names the file, the line and what a line must hold."""


@dataclass(frozen=True)
class Problem:
    """One line of a prompts file. Without `answer` the text is only shown, not judged."""

    prompt: str
    answer: str | None = None
    family: str = "-"


@dataclass
class Outcome:
    """What a server made of one problem; filled while its tokens arrive."""

    problem: Problem
    state: str = "waiting"  # waiting, running, done or failed
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: int = 0
    started: float = 0.0
    seconds: float = 0.0
    finish_reason: str = ""
    error: str = ""
    verifications: int | None = None  # full-attention forwards after prefill, as the server reports
    accepted_drafts: int | None = None
    retractions: int = 0  # times that a full KV pool made it wait in the middle

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right; None for a problem that carries none."""
        if self.problem.answer is None:
            return None
        return self.state == "done" and answer_of(self.text) == self.problem.answer

    @property
    def rate(self) -> float:
        """Tokens per second of this request since it was sent."""
        seconds = self.seconds or (time.monotonic() - self.started if self.started else 0.0)
        return self.tokens / seconds if seconds > 0 else 0.0

    def asdict(self) -> dict[str, Any]:
        return {**asdict(self), "correct": self.correct}


def answer_of(text: str) -> str | None:
    """What stands behind the last `Answer:` of `text`, or None."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def load_problems(path: Path) -> list[Problem]:
    """Read a JSON-lines file of {"prompt": text[, "answer": text, "family": text]}; other keys are ignored.

    Raises:
        PromptsError: the file cannot be read, holds no problem, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptsError(
            f"cannot read the prompts file {str(path)!r}: {reason}. "
            'Give a JSON-lines file whose lines look like {"prompt": "...", "answer": "42"}.'
        ) from None
    problems = [_problem(line, f"{path}, line {at}") for at, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise PromptsError(f"{path} holds no problem. Give at least one line such as {_example()}.")
    return problems


def _example() -> str:
    return '{"prompt": "...", "answer": "42"}'


def _problem(line: str, where: str) -> Problem:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not JSON ({error}). A line must look like {_example()}.") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str) or not raw["prompt"]:
        raise PromptsError(
            f'{where}: needs an object with a non-empty text under "prompt", got {line[:80]!r}. '
            f"A line must look like {_example()}."
        )
    answer = raw.get("answer")
    if answer is not None and not isinstance(answer, (str, int, float)):
        raise PromptsError(f'{where}: "answer" must be a text or a number, got {json.dumps(answer)[:80]}.')
    return Problem(
        raw["prompt"], None if answer is None else str(answer).strip(), str(raw.get("family", "-"))
    )


def encode_prompts(problems: Sequence[Problem], model_path: str) -> list[list[int]]:
    """Token ids of each prompt in the model's chat template, or as it is where the model has none."""
    from transformers import AutoTokenizer  # seconds to import: not at the top

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    if not tokenizer.chat_template:
        return [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for problem in problems
    ]


async def answer_all(
    url: str,
    prompt_ids: Sequence[list[int]],
    outcomes: Sequence[Outcome],
    *,
    max_tokens: int,
    concurrency: int,
    on_change: Callable[[Outcome], None] = lambda outcome: None,
) -> float:
    """Answer every problem at temperature 0, `concurrency` at a time; returns the seconds it took.

    A request that fails is marked in its outcome and does not end the others. `on_change` is called after
    each change of an outcome.
    """
    slots = asyncio.Semaphore(concurrency)
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as session:

        async def one(ids: list[int], outcome: Outcome) -> None:
            async with slots:
                await _answer(session, url, ids, outcome, max_tokens, on_change)

        await asyncio.gather(*(one(ids, out) for ids, out in zip(prompt_ids, outcomes, strict=True)))
    return time.monotonic() - began


async def _answer(
    session: aiohttp.ClientSession,
    url: str,
    ids: list[int],
    outcome: Outcome,
    max_tokens: int,
    on_change: Callable[[Outcome], None],
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "stream_interval": STREAM_INTERVAL}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    outcome.state, outcome.started = "running", time.monotonic()
    on_change(outcome)
    try:
        async with session.post(f"{url}/generate", json=body) as reply:
            if reply.status != 200:
                raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:500]}")
            async for line in reply.content:
                if event := parse_event(line):
                    apply_event(outcome, event)
                    on_change(outcome)
        if not outcome.finish_reason:
            raise ValueError("the stream ended before the answer did")
        outcome.state = "done"
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        outcome.state, outcome.error = "failed", str(error) or type(error).__name__
    outcome.seconds = time.monotonic() - outcome.started
    on_change(outcome)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one `data:` line of a stream; None for other lines and for `[DONE]`.

    Raises:
        ValueError: the line holds broken JSON, or the server reports an error in the stream.
    """
    if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
        return None
    event = json.loads(data)
    if "error" in event:
        error = event["error"]
        raise ValueError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    return event


def apply_event(outcome: Outcome, event: dict[str, Any]) -> None:
    """Take over an event of /generate: the whole text and the whole token ids so far, and `meta_info`.

    Raises:
        ValueError: the server ended the request with an abort.
    """
    meta = event["meta_info"]
    outcome.text = event["text"]
    outcome.token_ids = event.get("output_ids") or []
    outcome.tokens = meta["completion_tokens"]
    outcome.verifications = meta.get("spec_verify_ct")
    outcome.accepted_drafts = meta.get("spec_num_correct_drafts")
    outcome.retractions = meta.get("num_retractions") or 0
    if reason := meta.get("finish_reason"):
        if reason["type"] == "abort":
            raise ValueError(f"the server aborted the request: {reason.get('message', 'no reason given')}")
        outcome.finish_reason = reason["type"]
