"""Rounds: every request verifies once a round and drafts k times in between, whatever comes and goes."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from sglang_sparsespec.rounds.planner import DraftRow, RequestKey, RoundPlanner, VerifyRow, kv_reserve

SCHEDULES = ("lockstep", "unified")
STRIDES = (1, 2, 3, 8)


def keys(count, generation=0):
    return [RequestKey(pool, generation) for pool in range(1, count + 1)]


def verify_steps(plan):
    """The micro-step at which each row verifies."""
    return {row.row: at for at, step in enumerate(plan.micro_steps) for row in step.verifies}


@dataclass
class Life:
    """What a test knows of one request."""

    key: RequestKey
    drafted: int = 0  # since its last verification
    verified: int = 0
    at: int = -1  # where it last verified
    committed: int = 100
    known: int = 100  # committed, as far as the scheduler has heard: a round behind


class Batch:
    """Requests that arrive, finish, abort and pause at random; pool rows are handed out again at once."""

    def __init__(self, seed, rows=9):
        self.random = random.Random(seed)
        self.free = list(range(1, rows + 1))
        self.generation = Counter()
        self.running: list[Life] = []

    def change(self):
        for life in [life for life in self.running if self.random.random() < 0.15]:  # finished or aborted
            self.running.remove(life)
            self.free.insert(0, life.key.pool)
        for _ in range(self.random.choice([0, 0, 1, 2, 5])):
            if self.free:
                pool = self.free.pop(0)
                self.generation[pool] += 1
                self.running.append(Life(RequestKey(pool, self.generation[pool])))
        self.random.shuffle(self.running)

    def next_round(self):
        """Most of what runs: a request may sit out a round."""
        return [life for life in self.running if self.random.random() < 0.9]


def check_step(at, step, lives, verified_now, stride, schedule, accept):
    """One micro-step against what is known of each request, which is advanced."""
    rows = [row.row for row in (*step.drafts, *step.verifies)]
    assert len(rows) == len(set(rows))
    for row in set(range(len(lives))) - set(rows):
        assert schedule == "unified"
        assert lives[row].drafted == stride, "only who has drafted all may sit out"
    reserve = kv_reserve(stride, schedule)
    for row in step.verifies:
        life = lives[row.row]
        assert row == VerifyRow(row.row, life.drafted)
        if life.verified and (schedule == "lockstep" or life.at == at):
            assert life.drafted == stride, "only who has moved, or is new, may have drafted less"
        assert life.committed + life.drafted < life.known + reserve
        life.committed += accept(life.drafted)
        life.drafted, life.verified, life.at = 0, life.verified + 1, at
        verified_now[row.row] += 1
    for row in step.drafts:
        life = lives[row.row]
        assert row == DraftRow(row.row, life.drafted)
        assert life.drafted < stride
        assert life.committed + life.drafted < life.known + reserve
        life.drafted += 1


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_all_verify_once_a_round_and_draft_k_times_in_between(schedule, stride, seed):
    planner, batch = RoundPlanner(stride, schedule), Batch(seed)
    chance = random.Random(seed)
    reused = moved = False
    for _ in range(150):
        batch.change()
        lives = batch.next_round()
        for life in batch.running:
            if life not in lives:  # nothing of it is in flight: the scheduler hears all
                life.known = life.committed
        started = [life.committed for life in lives]
        places = [life.at for life in lives if life.verified]
        plan = planner.plan_round([life.key for life in lives])
        assert len(plan.micro_steps) == stride + 1
        verified = Counter()
        accept = (
            (lambda drafted: drafted + 1) if seed == 0 else (lambda drafted: chance.randint(1, drafted + 1))
        )
        old = [life for life in lives if life.verified]
        for at, step in enumerate(plan.micro_steps):
            check_step(at, step, lives, verified, stride, schedule, accept)
        assert verified == Counter(range(len(lives)))
        if schedule == "unified":
            loads = [len(step.verifies) for step in plan.micro_steps]
            assert max(loads) - min(loads) <= 1
        moved |= [life.at for life in old] != places
        for life, start in zip(lives, started, strict=True):
            life.known = start
        reused |= any(life.key.generation > 1 for life in lives)
    assert reused
    assert moved == (schedule == "unified")


def test_rebalancing_moves_as_few_as_can_be_and_as_near():
    planner = RoundPlanner(3, "unified")
    before = verify_steps(planner.plan_round(keys(8)))
    left = [key for row, key in enumerate(keys(8)) if before[row] in (2, 3)]  # offsets 0 and 1 are empty now
    after = verify_steps(planner.plan_round(left))
    assert sorted(after.values()) == [0, 1, 2, 3]
    places = [before[key.pool - 1] for key in left]
    assert sum(after[row] != place for row, place in enumerate(places)) == 2
    again = verify_steps(planner.plan_round(left))
    assert again == after, "who is balanced stays"


def test_a_request_that_moves_later_sits_out_and_one_that_moves_earlier_drafts_less():
    planner = RoundPlanner(3, "unified")
    before = verify_steps(planner.plan_round(keys(8)))
    late = [key for row, key in enumerate(keys(8)) if before[row] in (0, 1)]
    plan = planner.plan_round(late)
    assert [len(step.verifies) for step in plan.micro_steps] == [1] * 4
    assert all(row.drafted == 3 for step in plan.micro_steps for row in step.verifies)
    assert sum(len(step.drafts) + len(step.verifies) for step in plan.micro_steps) < 16
    planner.forget()
    planner.plan_round(keys(8))
    early = [key for row, key in enumerate(keys(8)) if before[row] in (2, 3)]
    plan = planner.plan_round(early)
    assert sorted(row.drafted for step in plan.micro_steps for row in step.verifies) == [1, 1, 3, 3]


@pytest.mark.parametrize("stride", STRIDES)
def test_lockstep_drafts_k_times_and_then_verifies_all(stride):
    planner = RoundPlanner(stride, "lockstep")
    for count in (1, 4, 7, 2):
        *drafting, last = planner.plan_round(keys(count)).micro_steps
        for at, step in enumerate(drafting):
            assert step.drafts == tuple(DraftRow(row, at) for row in range(count))
            assert step.verifies == ()
        assert last.drafts == ()
        assert last.verifies == tuple(VerifyRow(row, stride) for row in range(count))


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 20])
def test_unified_spreads_arrivals_evenly(stride, count):
    plan = RoundPlanner(stride, "unified").plan_round(keys(count))
    rows = [len(step.verifies) for step in plan.micro_steps]
    assert sum(rows) == count
    assert max(rows) - min(rows) <= 1


def test_unified_fills_the_gap_that_a_finished_request_leaves():
    planner = RoundPlanner(3, "unified")
    before = verify_steps(planner.plan_round(keys(4)))
    left = [key for key in keys(4) if key.pool != 2]
    after = verify_steps(planner.plan_round([*left, RequestKey(9, 0)]))
    assert after[3] == before[1]


def test_a_request_keeps_its_offset_when_the_batch_changes_order():
    planner = RoundPlanner(4, "unified")
    requests = keys(5)
    before = verify_steps(planner.plan_round(requests))
    after = verify_steps(planner.plan_round(requests[::-1]))
    assert [after[4 - row] for row in range(5)] == [before[row] for row in range(5)]


def test_a_new_generation_of_a_row_starts_afresh():
    planner = RoundPlanner(3, "unified")
    planner.plan_round(keys(4))
    plan = planner.plan_round(keys(4, generation=1))
    for at, step in enumerate(plan.micro_steps):
        assert all(row.drafted == at for row in step.verifies)


def test_forget_drops_all_cycles():
    planner = RoundPlanner(3, "unified")
    first = planner.plan_round(keys(4))
    assert planner.plan_round(keys(4)) != first  # drafts of the first round wait for verification
    planner.forget()
    assert planner.plan_round(keys(4)) == first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_that_see_the_same_decide_alike(schedule):
    planners = [RoundPlanner(3, schedule) for _ in range(2)]
    batch = Batch(seed=7)
    for _ in range(40):
        batch.change()
        requests = [life.key for life in batch.next_round()]
        first, second = (planner.plan_round(requests) for planner in planners)
        assert first == second


def test_an_empty_batch_has_empty_micro_steps():
    plan = RoundPlanner(2, "unified").plan_round([])
    assert [len(step.drafts) + len(step.verifies) for step in plan.micro_steps] == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "told"),
    [((0, "lockstep"), "stride is 0"), ((3, "eager"), "'eager'; allowed: lockstep, unified")],
)
def test_what_it_cannot_plan_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        RoundPlanner(*given)


# --- KV slots ---


def furthest_write(schedule, stride, rounds, accept):
    """Most slots that a request needs beyond the length that the host knows, one round behind the device."""
    planner, requests = RoundPlanner(stride, schedule), keys(2 * stride + 3)
    committed = [100] * len(requests)
    known = list(committed)
    needed = 0
    for _ in range(rounds):
        start = list(committed)
        for step in planner.plan_round(requests).micro_steps:
            for row in step.drafts:
                needed = max(needed, committed[row.row] + row.drafted + 1 - known[row.row])
            for row in step.verifies:
                needed = max(needed, committed[row.row] + row.drafted + 1 - known[row.row])
                committed[row.row] += accept(row.drafted)
        known = start
    return needed


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kv_reserve_is_needed_in_full_when_all_is_accepted(schedule, stride):
    assert furthest_write(schedule, stride, 6, lambda drafted: drafted + 1) == kv_reserve(stride, schedule)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_the_kv_reserve_is_enough_for_any_acceptance(schedule, stride, seed):
    chance = random.Random(seed)
    needed = furthest_write(schedule, stride, 60, lambda drafted: chance.randint(1, drafted + 1))
    assert needed <= kv_reserve(stride, schedule)


# --- rounds of fewer drafts ---


def test_lockstep_rounds_may_have_fewer_drafts_and_leave_nothing_behind():
    planner = RoundPlanner(5, "lockstep")
    for drafts in (5, 0, 2, None, 0, 5):
        plan = planner.plan_round(keys(3), drafts)
        count = 5 if drafts is None else drafts
        assert plan.drafts == count == len(plan.micro_steps) - 1
        for at, step in enumerate(plan.micro_steps[:-1]):
            assert step.drafts == tuple(DraftRow(row, at) for row in range(3))
            assert not step.verifies
        assert plan.micro_steps[-1].verifies == tuple(VerifyRow(row, count) for row in range(3))


def test_either_schedule_round_by_round_drains_nothing():
    rng, planner = random.Random(2), RoundPlanner(4, "auto")
    lives = [Life(key) for key in keys(11)]
    for _ in range(200):
        unified = rng.random() < 0.5
        drafts = 4 if unified else rng.randint(0, 4)
        plan = planner.plan_round([life.key for life in lives], drafts, unified=unified)
        assert plan.drafts == drafts
        assert plan.unified == unified
        verified = Counter()
        for step in plan.micro_steps:
            for row in step.verifies:
                assert row.drafted == lives[row.row].drafted, "all that was drafted is verified"
                lives[row.row].drafted = 0
                verified[row.row] += 1
            for row in step.drafts:
                assert row.drafted == lives[row.row].drafted < 4
                lives[row.row].drafted += 1
        assert verified == Counter(range(11))
        loads = [len(step.verifies) for step in plan.micro_steps]
        assert max(loads) - min(loads) <= 1 or not unified
        assert unified or all(life.drafted == 0 for life in lives), "lockstep leaves nothing half drafted"


@pytest.mark.parametrize(("schedule", "drafts"), [("unified", 3), ("lockstep", -1), ("lockstep", 5)])
def test_a_number_of_drafts_that_the_schedule_cannot_make_is_refused(schedule, drafts):
    with pytest.raises(ValueError, match=f"a {schedule} round of stride 4 cannot make {drafts} drafts"):
        RoundPlanner(4, schedule).plan_round(keys(2), drafts)
