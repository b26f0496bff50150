"""A load that swings between few and many requests: what does changing the number of drafts cost?

`few` requests decode all the time; in every second period there are `many`, which the client aborts at the
period's end. The prompts are in the radix cache before the clock starts, so that hardly any prefill is in the
figures. Tokens/s of all requests together, over all periods and over those of each kind; the better of the
servers that never change, for each kind of period, is what one that changes is measured against.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import cell as cells
from sglang_sparsespec._client import parse_event

NEW_TOKENS = 4096  # of a request; whoever finishes starts again


class Swing:
    """One server's run: workers that ask for the same prompts again and again; tokens of each period.

    Args:
        prompts: one for each of the many requests.
        few: how many of them decode all the time.
        period, seconds: of one swing, and of the run.
    """

    def __init__(
        self, url: str, prompts: Sequence[list[int]], *, few: int, period: float, seconds: float
    ) -> None:
        self.url, self.prompts, self.few, self.period = url, prompts, few, period
        self.tokens = [0] * max(1, round(seconds / period))
        self._began = 0.0

    async def run(self) -> list[int]:
        """Tokens of each period; the even ones have few requests."""
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._ask(session, ids, new_tokens=1) for ids in self.prompts))
            self._began = time.monotonic()
            few = [asyncio.create_task(self._work(session, ids)) for ids in self.prompts[: self.few]]
            try:
                for period in range(len(self.tokens)):
                    rest = self.prompts[self.few :] if period % 2 else []
                    more = [asyncio.create_task(self._work(session, ids)) for ids in rest]
                    ends = self._began + (period + 1) * self.period
                    await asyncio.sleep(max(0.0, ends - time.monotonic()))
                    await _end([*more, *(task for task in few if task.done())])
            finally:
                await _end(few)
        return self.tokens

    async def _work(self, session: aiohttp.ClientSession, ids: list[int]) -> None:
        while True:
            await self._ask(session, ids, new_tokens=NEW_TOKENS)

    async def _ask(self, session: aiohttp.ClientSession, ids: list[int], *, new_tokens: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, "stream_interval": 4}
        body, seen = {"input_ids": ids, "sampling_params": sampling, "stream": True}, 0
        async with session.post(f"{self.url}/generate", json=body) as reply:
            if reply.status != 200:
                raise cells.CellError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if event := parse_event(line):
                    now = event["meta_info"]["completion_tokens"]
                    self._count(now - seen)
                    seen = now

    def _count(self, tokens: int) -> None:
        at = int((time.monotonic() - self._began) / self.period) if self._began else -1
        if 0 <= at < len(self.tokens):
            self.tokens[at] += tokens


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel workers. Raises what one of them has failed with."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def figures(tokens: Sequence[int], period: float) -> dict[str, Any]:
    """Tokens/s over all periods, over those with few requests, and over those with many."""

    def speed(part: Sequence[int]) -> float:
        return round(sum(part) / (len(part) * period), 2) if part else 0.0

    return {
        "tokens_per_s": speed(tokens),
        "few": speed(tokens[::2]),
        "many": speed(tokens[1::2]),
        "periods": tokens,
    }


def share_of_the_better(run: dict[str, Any], fixed: Sequence[dict[str, Any]]) -> float | None:
    """Tokens of a run over those of the better fixed mode of each kind of period; None without any."""
    best = sum(max((other[kind] for other in fixed), default=0.0) for kind in ("few", "many"))
    return round((run["few"] + run["many"]) / best, 4) if best else None
