"""Who leaves a full KV pool and who comes in, over a simulated pool: nothing is computed twice, nobody
starves, the pool stays full."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.memory.lengths import ENOUGH, KEPT, ExpectedLengths
from sglang_sparsespec.memory.offload import Offload, arrival
from sglang_sparsespec.rounds.planner import kv_reserve

STRIDE = 4


@dataclass(eq=False)
class Request:
    rid: str
    prompt: int
    length: int  # tokens that it will put out
    most: int
    aborted: bool = False
    output_ids: list = field(default_factory=list)
    committed: int = 0  # tokens with KV in the pool
    inserted: int = 0  # of these, in the tree
    copied: int = 0  # of these, on the host, or on their way
    finished_reason: object = None
    times_out: int = 0

    @property
    def origin_input_ids(self):
        return range(self.prompt)

    @property
    def sampling_params(self):
        return SimpleNamespace(max_new_tokens=self.most, ignore_eos=False)

    def finished(self):
        return self.finished_reason is not None

    def end(self, kind):
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})


class Simulation:
    """SGLang's scheduler as far as memory goes. KV that is not on the host when a request leaves is lost."""

    def __init__(self, size, config, seed, *, host=10**9):
        self.size, self.config, self.host = size, config, host
        self.offload = Offload(config, clock=lambda: 0.0)
        self.running, self.waiting, self.done = [], [], []
        self.rng = random.Random(seed)
        self.backs_up = False
        self.usage = []
        self.lost = 0

    # -- what `memory.offload` asks --

    def room(self):
        return self.size - sum(r.committed for r in self.running), self.size

    def needed(self, batch):
        return len(batch.reqs) * kv_reserve(STRIDE, "lockstep")

    def fits(self, batch):
        return self.room()[0] >= self.needed(batch)

    def queued(self):
        return bool(self.waiting)

    def length(self, req):
        return req.committed

    def fresh(self, req):
        return req.committed - req.inserted

    def back_up(self, on):
        self.backs_up = on

    def finish_copies(self):
        pass

    def process_results(self):
        return True

    def checkpoint(self, req, *, whole):
        start = 0 if whole else req.inserted
        req.inserted = req.committed
        held = sum(r.copied for r in [*self.running, *self.waiting])
        if self.backs_up and req.copied >= start and held + req.committed - req.copied <= self.host:
            req.copied = req.committed

    # -- the loop --

    def arrive(self, req):
        self.waiting.append(req)
        self.offload.arrived(req)

    def step(self):
        self.admit()
        if not self.running:
            return
        batch = SimpleNamespace(reqs=self.running)
        self.offload.before_round(self, batch)
        while not self.fits(SimpleNamespace(reqs=self.running)) and len(self.running) > 1:
            self.take_out(self.running[self.offload.kept_first(self.running)[-1]])
        assert self.fits(SimpleNamespace(reqs=self.running))
        if self.waiting:
            self.usage.append(1 - self.room()[0] / self.size)
        for req in list(self.running):
            more = min(self.rng.randint(1, STRIDE + 1), req.length - len(req.output_ids))
            req.output_ids.extend([0] * more)
            req.committed += more
            if len(req.output_ids) == req.length:
                req.end("stop")
                self.running.remove(req)
                self.done.append(req)

    def take_out(self, req):
        first = min([*self.running, *self.waiting], key=arrival)
        assert req is not first, "who came first was taken out"
        self.offload.leaves(self, req)
        self.running.remove(req)
        req.committed = req.inserted = 0
        req.times_out += 1
        self.waiting.append(req)
        self.offload.place_in_queue(self.waiting)

    def admit(self):
        while self.waiting:
            req = self.waiting[0]
            tokens = req.prompt + len(req.output_ids)
            ahead = sum(self.offload.ahead(r) for r in [*self.running, req])
            if tokens + ahead > self.room()[0]:
                return
            self.waiting.pop(0)
            self.lost += max(0, tokens - req.copied) if req.times_out else 0
            self.offload.admitted(req, cached=req.copied, loaded=req.copied)
            req.committed = req.inserted = tokens
            self.running.append(req)


def config(**others):
    return SparseSpecConfig(stride=STRIDE, offload="on", **others)


def run(seed, *, requests=60, size=4000, lengths=(1, 1000), aborts=0.02, host=10**9, **others):
    given = {"checkpoint_tokens": 64, "admit_ahead": 24} | others
    simulation = Simulation(size, config(**given), seed, host=host)
    rng = random.Random(seed + 1)
    for i in range(requests):
        simulation.arrive(Request(f"r{i}", rng.randint(1, 300), rng.randint(*lengths), most=2 * lengths[1]))
    for _ in range(20_000):
        simulation.step()
        if rng.random() < aborts and len(simulation.waiting) > 1:
            gone = simulation.waiting.pop(rng.randrange(1, len(simulation.waiting)))
            gone.end("abort")
            simulation.offload.forget(gone)
            simulation.done.append(gone)
        if len(simulation.done) == requests:
            return simulation
    raise AssertionError(f"{requests - len(simulation.done)} requests never ended")


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_computed_twice_and_all_end(seed):
    simulation = run(seed)
    counts = simulation.offload.counts
    assert counts.retractions > 5
    assert simulation.lost == counts.recomputed == 0
    assert not simulation.offload.out and simulation.room()[0] == simulation.size
    assert counts.returns <= counts.retractions  # some were aborted while they were out


def test_the_pool_stays_full():
    """96 requests of 4k to 16k tokens, which may put out 32k, over a pool of 250k."""
    simulation = run(
        0,
        requests=96,
        size=250_000,
        lengths=(4000, 16_000),
        aborts=0,
        checkpoint_tokens=1024,
        admit_ahead=256,
    )
    counts = simulation.offload.counts
    assert sum(simulation.usage) / len(simulation.usage) >= 0.95
    assert simulation.lost == counts.recomputed == 0 < counts.retractions


def test_a_full_host_costs_computing_and_nothing_else():
    simulation = run(3, host=500)
    counts = simulation.offload.counts
    assert counts.recomputed == simulation.lost > 0
    assert not simulation.offload.out


def test_without_pressure_nothing_is_copied():
    simulation = run(5, size=10**6)
    counts = simulation.offload.counts
    assert counts.checkpoints == counts.retractions == counts.waits == 0 and not simulation.backs_up


def test_who_came_first_stays_and_who_was_taken_out_comes_before_all_later_ones():
    offload = Offload(config())
    reqs = [Request(f"r{i}", 1, 1, 1) for i in range(5)]
    for req in reqs:
        offload.arrived(req)
    offload.arrived(reqs[0])  # again, after it was taken out
    assert [arrival(r) for r in reqs] == [1, 2, 3, 4, 5]
    assert offload.kept_first([reqs[3], reqs[0], reqs[2]]) == [1, 2, 0]
    queue = [reqs[0], reqs[3], reqs[4], reqs[2]]
    offload.place_in_queue(queue)
    assert [r.rid for r in queue] == ["r0", "r2", "r3", "r4"]
    queue = [reqs[0], reqs[4]]
    offload.place_in_queue(queue)
    assert [r.rid for r in queue] == ["r0", "r4"]


def test_last_tokens_are_copied_before_they_are_needed():
    simulation = Simulation(100, config(checkpoint_tokens=1000), seed=0)
    early, late = Request("a", 40, 99, 99, committed=40), Request("b", 30, 99, 99, committed=30)
    for req in (early, late):
        simulation.offload.arrived(req)
    simulation.running = [early, late]
    simulation.offload.before_round(simulation, SimpleNamespace(reqs=simulation.running))
    assert not late.copied  # in use: 70 of 100
    early.committed = 52
    simulation.offload.before_round(simulation, SimpleNamespace(reqs=simulation.running))
    assert late.copied == 30 and not early.copied


def test_lengths_are_those_of_the_class_and_what_is_left_of_the_longer_ones():
    lengths = ExpectedLengths()
    assert lengths.remaining(100, 0, 4096) == 4096  # nothing is known
    for output in (100, 200, 300):
        lengths.ended(100, output)
    assert lengths.remaining(100, 0, 4096) == 200
    assert lengths.remaining(5000, 0, 4096) == 200  # of all, as its class is unknown
    assert lengths.remaining(100, 150, 4096) == 100  # the mean of 50 and 150
    assert lengths.remaining(100, 150, 60) == 60
    assert lengths.remaining(100, 400, 4096) == 400  # longer than all
    for _ in range(ENOUGH):
        lengths.ended(5000, 3000)
    assert lengths.remaining(5000, 0, 4096) == 3000
    assert lengths.remaining(4097, 0, 4096) == 3000  # the same class
    for _ in range(KEPT):
        lengths.ended(5000, 10)
    assert lengths.remaining(5000, 0, 4096) == 10  # old ones are forgotten


def test_only_requests_that_ended_by_themselves_are_counted():
    simulation = Simulation(1000, config(), seed=0)
    reqs = [Request(f"r{i}", 10, 5, 50, committed=10) for i in range(3)]
    simulation.offload.before_round(simulation, SimpleNamespace(reqs=reqs))
    reqs[0].output_ids, reqs[1].output_ids = [0] * 7, [0] * 30
    reqs[0].end("stop")
    reqs[1].end("abort")
    simulation.offload.before_round(simulation, SimpleNamespace(reqs=reqs[2:]))
    assert simulation.offload.lengths.remaining(10, 0, 50) == 7


@pytest.mark.parametrize(
    ("done", "most", "ignores", "wanted"),
    [
        (0, 1000, False, 256),  # nothing is known: as far as admission looks
        (990, 1000, False, 10),
        (0, 4, False, 4),
        (0, 1000, True, 256),
        (1000, 1000, False, 0),
    ],
)
def test_room_ahead_is_what_is_left_and_at_most_what_was_asked_for(done, most, ignores, wanted):
    req = Request("a", 10, 10, most, output_ids=[0] * done)
    request = SimpleNamespace(
        output_ids=req.output_ids,
        origin_input_ids=req.origin_input_ids,
        sampling_params=SimpleNamespace(max_new_tokens=most, ignore_eos=ignores),
    )
    assert Offload(config()).ahead(request) == wanted


def test_room_ahead_holds_a_round_for_requests_that_should_have_ended():
    offload = Offload(config())
    offload.lengths.ended(10, 20)
    assert offload.ahead(Request("a", 10, 0, 1000, output_ids=[0] * 19)) == kv_reserve(STRIDE, "lockstep")


def test_what_happened_is_told():
    ticks = iter([10.0, 13.5])
    simulation = Simulation(100, config(), seed=0)
    offload = simulation.offload
    offload.clock = lambda: next(ticks)
    req = Request("a", 30, 99, 99, committed=30)
    offload.leaves(simulation, req)
    assert offload.describe(5, 60)["out"] == 1
    offload.admitted(req, cached=28, loaded=20)
    offload.admitted(Request("b", 3, 1, 1), cached=2, loaded=2)
    offload.wrote(30, 3000)
    told = offload.describe(5, 60)
    wanted = {
        "host_tokens_used": 5, "host_tokens": 60, "checkpoints": 1, "checkpointed_tokens": 30,
        "retractions": 1, "returns": 1, "out": 0, "recomputed_tokens": 2, "loaded_tokens": 22,
        "offloaded_tokens": 30, "offloaded_bytes": 3000, "seconds_out_mean": 3.5, "seconds_out_most": 3.5,
    }  # fmt: skip
    assert {key: told[key] for key in wanted} == wanted and told["pool_usage_mean"] is None
