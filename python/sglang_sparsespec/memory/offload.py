"""Which KV is copied to the host, which request leaves a full pool, and which may come in.

The copies are SGLang's (its HiCache): KV in the radix tree goes to the host tier on a stream of its own, and
comes back layer by layer under the prefill that resumes a request. This module decides. It is pure Python and
knows requests and the pool only as `memory` shows them (`compat.SchedulerMemory`), so that its tests need no
server.

(SparseSpec's dynamic KV-cache management. There, victims are the shortest requests, and chunks are copied by
an offload engine of its own.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.memory.lengths import ExpectedLengths
from sglang_sparsespec.rounds.planner import kv_reserve


class Tree(Protocol):
    """The radix tree, which hands KV to the host. Lengths are in tokens."""

    def length(self, req: Any) -> int:
        """Committed tokens of a running request."""

    def fresh(self, req: Any) -> int:
        """How many of these are not in the tree yet; 0 where the request must stay out of it."""

    def checkpoint(self, req: Any, *, whole: bool) -> None:
        """Put the committed tokens into the tree, unless the request must stay out of it. whole: also look at
        those that were there before."""

    def back_up(self, on: bool) -> None:
        """Whether what is put into the tree is copied to the host from now on."""

    def finish_copies(self) -> None:
        """Wait until all that is being copied to the host is there. Until then it keeps its place in the
        pool."""


class Memory(Tree, Protocol):
    """The KV pool and its requests, as SGLang's scheduler has them."""

    def room(self) -> tuple[int, int]:
        """Tokens that are free or can be made so at once, and tokens of the pool."""

    def needed(self, batch: Any) -> int:
        """Tokens that the next round allocates."""

    def fits(self, batch: Any) -> bool:
        """Whether the next round's tokens can be allocated. Drops cached KV for it."""

    def queued(self) -> bool:
        """Whether requests wait to come in."""

    def process_results(self) -> bool:
        """Wait for the round that is running, and let its outcome count. False where none is."""


@dataclass
class Out:
    """A request that was taken out of the pool."""

    committed: int  # tokens
    since: float  # seconds of the clock


@dataclass
class OffloadCounts:
    """Since the server started. Lengths in tokens."""

    checkpoints: int = 0
    checkpointed: int = 0
    written: int = 0
    written_bytes: int = 0
    loaded: int = 0
    retractions: int = 0
    returns: int = 0
    recomputed: int = 0
    seconds_out: float = 0.0
    most_seconds_out: float = 0.0
    waits: int = 0  # rounds waited for before a request was taken out
    rounds: int = 0  # while requests wait to come in
    usage: float = 0.0  # share of the pool in use, sum over these rounds


@dataclass
class Offload:
    """Decides for one scheduler. Every rank decides alike: nothing here depends on time.

    Args:
        config: `checkpoint_tokens`, `offload_watermark`, `admit_ahead`; k for the size of a round.
        clock: seconds, for what is reported only.
    """

    config: SparseSpecConfig
    clock: Callable[[], float] = time.monotonic
    counts: OffloadCounts = field(default_factory=OffloadCounts)
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    out: dict[str, Out] = field(default_factory=dict)  # by request id
    _arrivals: int = 0
    _running: dict[str, Any] = field(default_factory=dict)
    _backed: set[str] = field(
        default_factory=set
    )  # running requests whose whole prefix was handed to the host

    # -- the pool -------------------------------------

    def before_round(self, memory: Memory, batch: Any) -> None:
        """Called before each decoding round, with the requests that would take part."""
        self._notice_ends(batch.reqs)
        free, size = memory.room()
        if memory.queued():  # else the pool is as full as it can be
            self.counts.rounds += 1
            self.counts.usage += 1 - free / size
        pressed = free <= (1 - self.config.offload_watermark) * size
        memory.back_up(pressed or bool(self.out))
        if not pressed:
            return
        for req in batch.reqs:
            if memory.fresh(req) >= self.config.checkpoint_tokens:
                self._checkpoint(memory, req)
        # Who leaves in one of the next rounds leaves nothing behind: its last tokens are on the host by then.
        soon = 2 * len(batch.reqs) * (self.config.stride + 1)
        if free - memory.needed(batch) < soon:
            for req in self._victims(batch.reqs):
                if soon <= 0:
                    break
                soon -= memory.length(req)
                if memory.fresh(req):
                    self._checkpoint(memory, req)
        if not memory.fits(batch):
            # The outcome of a round that runs for a request which leaves would be lost, and made again.
            self.counts.waits += memory.process_results()

    def _checkpoint(self, tree: Tree, req: Any) -> None:
        self.counts.checkpoints += 1
        self.counts.checkpointed += tree.fresh(req)
        tree.checkpoint(req, whole=req.rid not in self._backed)
        self._backed.add(req.rid)

    def _notice_ends(self, reqs: Sequence[Any]) -> None:
        running = {req.rid: req for req in reqs}
        for rid, req in self._running.items():
            if rid not in running and ended_by_itself(req):
                self.lengths.ended(len(req.origin_input_ids), len(req.output_ids))
        self._running = running
        self._backed &= running.keys()

    # -- who leaves -------------------------------------

    def arrived(self, req: Any) -> None:
        """A request stands in the queue; the first time gives it its place."""
        if getattr(req, "_sparsespec_arrival", None) is None:
            self._arrivals += 1
            req._sparsespec_arrival = self._arrivals

    def kept_first(self, reqs: Sequence[Any]) -> list[int]:
        """Indices of running requests, the one to keep longest first.

        Who came first stays: it is never taken out by one that came later, so each gets its turn.
        """
        return sorted(range(len(reqs)), key=lambda i: arrival(reqs[i]))

    def _victims(self, reqs: Sequence[Any]) -> list[Any]:
        return [reqs[i] for i in reversed(self.kept_first(reqs))]

    def leaves(self, tree: Tree, req: Any) -> None:
        """A running request is about to be taken out of the pool."""
        tree.back_up(True)
        if tree.fresh(req) or req.rid not in self._backed:
            self._checkpoint(tree, req)
        # A few tokens: all else went before. Without them, others would have to leave too.
        tree.finish_copies()
        self.counts.retractions += 1
        self.out[req.rid] = Out(tree.length(req), self.clock())

    def place_in_queue(self, queue: list[Any]) -> None:
        """The last of the queue was taken out of the pool: it goes before all that came after it."""
        req = queue.pop()
        at = next((i for i, other in enumerate(queue) if arrival(other) > arrival(req)), len(queue))
        queue.insert(at, req)

    def forget(self, req: Any) -> None:
        """A request ended while it was out."""
        self.out.pop(req.rid, None)

    # -- who comes in -------------------------------------

    def ahead(self, req: Any) -> int:
        """Tokens of room that a request should find for its growth: what it is expected to put out still, at
        most `admit_ahead`, and no less than a round takes."""
        most = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        left = most
        if not req.sampling_params.ignore_eos:
            left = self.lengths.remaining(len(req.origin_input_ids), len(req.output_ids), most)
        round_ = kv_reserve(self.config.stride, self.config.schedule)
        return min(most, max(min(left, self.config.admit_ahead), round_))

    def admitted(self, req: Any, *, cached: int, loaded: int) -> None:
        """A request goes into the next prefill: `cached` of its tokens have KV, `loaded` of these from the
        host."""
        self.counts.loaded += loaded
        out = self.out.pop(req.rid, None)
        if out is None:
            return
        self.counts.returns += 1
        self.counts.recomputed += max(0, out.committed - cached)
        seconds = self.clock() - out.since
        self.counts.seconds_out += seconds
        self.counts.most_seconds_out = max(self.counts.most_seconds_out, seconds)

    def wrote(self, tokens: int, size: int) -> None:
        """So many tokens, and bytes, have reached the host."""
        self.counts.written += tokens
        self.counts.written_bytes += size

    def describe(self, held: int, size: int) -> dict[str, Any]:
        """What `/server_info` shows under `offload`. held, size: tokens in the host tier, and its size."""
        counts = self.counts
        return {
            "pool_usage_mean": round(counts.usage / counts.rounds, 4) if counts.rounds else None,
            "host_tokens": size,
            "host_tokens_used": held,
            "checkpoints": counts.checkpoints,
            "checkpointed_tokens": counts.checkpointed,
            "offloaded_tokens": counts.written,
            "offloaded_bytes": counts.written_bytes,
            "loaded_tokens": counts.loaded,
            "retractions": counts.retractions,
            "returns": counts.returns,
            "out": len(self.out),
            "recomputed_tokens": counts.recomputed,
            "seconds_out_mean": round(counts.seconds_out / counts.returns, 4) if counts.returns else None,
            "seconds_out_most": round(counts.most_seconds_out, 4),
            "waits": counts.waits,
        }


def arrival(req: Any) -> int:
    """A request's place among all that arrived; those that were never queued are first."""
    return getattr(req, "_sparsespec_arrival", None) or 0


def ended_by_itself(req: Any) -> bool:
    """Whether a request ended, and not by being aborted."""
    return bool(req.finished()) and req.finished_reason.to_json().get("type") != "abort"
