"""One cell: requests of equal context decode together; only the time in which all of them do counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from sglang_sparsespec._client import parse_event

STREAM_INTERVAL = 8  # tokens between two events of a request; its count in between is interpolated
SLACK_TOKENS = 64  # KV slots a request besides context and new tokens: drafts in flight
IDLE_S = 30.0


class CellError(RuntimeError):
    """A cell that could not be measured."""


class DoesNotFitError(CellError):
    """A cell whose requests cannot all decode at the same time."""


@dataclass
class Stream:
    """What one request streamed: at `times` (seconds, monotonic) it had so many `tokens`.

    The server tells `verifications` and `accepted` drafts with the last event only, of the whole request.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    verifications: int = 0
    accepted: int = 0
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False

    def add(self, now: float, event: dict[str, Any]) -> None:
        """Take over an event of /generate. Raises CellError when the server aborted the request."""
        meta = event["meta_info"]
        self.times.append(now)
        self.tokens.append(meta["completion_tokens"])
        self.verifications = meta.get("spec_verify_ct", 0)
        self.accepted = meta.get("spec_num_correct_drafts", 0)
        self.ids = event.get("output_ids") or self.ids
        self.cached_tokens = meta.get("cached_tokens", 0)
        if reason := meta.get("finish_reason"):
            if reason["type"] == "abort":
                raise CellError(f"the server aborted a request: {reason.get('message', 'no reason given')}")
            self.finished = True

    @property
    def tokens_per_verification(self) -> float | None:
        """The request's acceptance length; None without speculation."""
        return 1 + self.accepted / self.verifications if self.verifications else None

    def past(self, tokens: int) -> float | None:
        """When the stream had at least `tokens`; None when it never had."""
        return next((t for t, n in zip(self.times, self.tokens, strict=True) if n >= tokens), None)


@dataclass(frozen=True)
class Window:
    """The time in which all requests decoded, and what they did in it.

    `verifications` is each request's tokens in the window over its acceptance length.
    """

    seconds: float
    tokens: float
    verifications: float
    requests: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Milliseconds of one decoding step; of one round where the server speculates."""
        return 1e3 * self.seconds * self.requests / (self.verifications or self.tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verification yielded; None without speculation."""
        return self.tokens / self.verifications if self.verifications else None


def measure(streams: Sequence[Stream], lead: int = 0) -> Window:
    """From when the last stream is past `lead` tokens (its first token at least) to when the first one ends.

    Raises:
        DoesNotFitError: one ended before another began: they did not decode together.
        CellError: a stream has no tokens or no end.
    """
    starts = [stream.past(max(1, lead)) for stream in streams]
    if not streams or None in starts or not all(stream.finished for stream in streams):
        raise CellError("a request ended early: its stream holds too few tokens.")
    start, end = max(t for t in starts if t is not None), min(stream.times[-1] for stream in streams)
    if end <= start:
        raise DoesNotFitError("the first request ended before the last one was past its prefill.")

    made = [float(np.diff(np.interp([start, end], s.times, s.tokens))[0]) for s in streams]
    lengths = [stream.tokens_per_verification for stream in streams]
    return Window(
        seconds=end - start,
        tokens=sum(made),
        verifications=sum(n / length for n, length in zip(made, lengths, strict=True) if length),
        requests=len(streams),
    )


def tokens_needed(requests: int, context: int, new_tokens: int) -> int:
    """KV slots that a cell needs at its end, drafts in flight included."""
    return requests * (context + new_tokens + SLACK_TOKENS)


def check_fit(requests: int, context: int, new_tokens: int, *, capacity: int, max_requests: int) -> None:
    """Raises DoesNotFitError when the server cannot run all requests at the same time."""
    needed = tokens_needed(requests, context, new_tokens)
    if needed > capacity:
        raise DoesNotFitError(f"needs {needed} KV tokens, the pool holds {capacity}.")
    if requests > max_requests:
        raise DoesNotFitError(f"the server runs {max_requests} requests at a time.")


async def run_streams(
    url: str,
    prompts: Sequence[list[int]],
    *,
    new_tokens: int,
    lead: int,
    timeout_s: float,
    on_change: Callable[[list[Stream]], None] = lambda streams: None,
) -> tuple[list[Stream], dict[str, Any]]:
    """Send all prompts at once, temperature 0, no early end.

    Returns their streams, and the server's load from when the last of them was past `lead` tokens ({} where
    it is not known).

    Raises:
        CellError: a request failed, or `timeout_s` is over; what still runs is aborted.
    """
    streams = [Stream() for _ in prompts]
    sampling = {
        "temperature": 0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": STREAM_INTERVAL,
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22) as session:
        waiting = set(range(len(prompts)))

        async def one(at: int) -> None:
            body = {"input_ids": prompts[at], "sampling_params": sampling, "stream": True}
            async with session.post(f"{url}/generate", json=body) as reply:
                if reply.status != 200:
                    raise CellError(f"HTTP {reply.status}: {(await reply.text())[:500]}")
                async for line in reply.content:
                    if event := parse_event(line):
                        streams[at].add(time.monotonic(), event)
                        if at in waiting and streams[at].tokens[-1] >= max(1, lead):
                            waiting.discard(at)
                            if not waiting:
                                polls.append(asyncio.ensure_future(get_load(session, url)))
                        on_change(streams)

        polls: list[asyncio.Future[dict[str, Any]]] = []
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for at in range(len(prompts)):
                    group.create_task(one(at))
            load = await polls[0] if polls else {}
        except TimeoutError:
            raise CellError(f"not done after {timeout_s:.0f} s; the requests were aborted.") from None
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise CellError(str(first) or type(first).__name__) from first
    return streams, load


async def get_load(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The core figures of /v1/loads of the first rank; {} where the server gives none within 10 s."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with session.get(f"{url}/v1/loads", params={"include": "core"}, timeout=timeout) as reply:
            loads = (await reply.json()).get("loads") if reply.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return {}
    return loads[0] if loads else {}


async def get_info(url: str) -> dict[str, Any]:
    """/server_info. Raises aiohttp.ClientError when the server does not answer in 30 s."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.get(f"{url}/server_info") as reply,
    ):
        return await reply.json()


async def flush(url: str) -> None:
    """Empty the radix cache and, with NGRAM, the drafter's memory, once the server is idle.

    Raises:
        CellError: the server is still busy after 30 s, or refuses.
    """
    timeout = aiohttp.ClientTimeout(total=IDLE_S + 10)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/flush_cache", params={"timeout": IDLE_S}) as reply,
    ):
        if reply.status != 200:
            raise CellError(f"/flush_cache: HTTP {reply.status}: {(await reply.text())[:300]}")
