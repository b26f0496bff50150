"""Counts of drafts and acceptances, and the timer of phases."""

import json
import subprocess
import sys

import pytest
from sglang_sparsespec.metrics import AcceptanceMetrics, PhaseTimer


def test_nothing_counted_yet():
    assert AcceptanceMetrics(2).snapshot() == {
        "rounds": 0,
        "plain_steps": 0,
        "unified_rounds": 0,
        "rounds_by_drafts": {},
        "rounds_by_reason": {},
        "verifications": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "filled_rounds": 0,
        "looked_up_tokens": 0,
        "accept_length": None,
        "acceptance_by_position": [None, None],
        "budget_tokens_mean": None,
    }


def test_drafts_are_counted_by_position():
    metrics = AcceptanceMetrics(3)
    metrics.launched([3, 3, 1, 0], [100, 200, 50, 10])
    metrics.finished([3, 1, 0, 0])
    assert metrics.drafted == [3, 2, 2]
    assert metrics.accepted == [2, 1, 1]
    assert metrics.snapshot() == {
        "rounds": 1,
        "plain_steps": 0,
        "unified_rounds": 0,
        "rounds_by_drafts": {},
        "rounds_by_reason": {},
        "verifications": 4,
        "drafted_tokens": 7,
        "accepted_tokens": 4,
        "filled_rounds": 0,
        "looked_up_tokens": 0,
        "accept_length": 2.0,
        "acceptance_by_position": [0.6667, 0.5, 0.5],
        "budget_tokens_mean": 90.0,
    }


def test_plain_steps_are_no_rounds():
    metrics = AcceptanceMetrics(4)
    for drafts, reason in ((0, "load"), (4, "faster"), (0, "load")):
        metrics.chose(drafts, reason)
        metrics.launched([drafts] * 2, [50, 70])
    assert metrics.finished([0, 0]) == ([0, 0], None)
    assert metrics.finished([4, 2]) == ([4, 4], None)
    assert metrics.finished([0, 0]) == ([0, 0], None)
    assert metrics.finished([0, 0]) is None
    found = metrics.snapshot()
    assert (found["rounds"], found["plain_steps"], found["verifications"]) == (1, 2, 2)
    assert found["accept_length"] == 4.0
    assert found["rounds_by_drafts"] == {"0": 2, "4": 1}
    assert found["rounds_by_reason"] == {"faster": 1, "load": 2}


def test_tokens_that_were_looked_up_are_counted_apart():
    metrics = AcceptanceMetrics(4)
    metrics.launched([1, 1, 1], [50, 50, 50], 4)
    assert metrics.finished([4, 0, 2]) == ([1, 1, 1], 4)
    found = metrics.snapshot()
    assert (found["filled_rounds"], found["looked_up_tokens"], found["accepted_tokens"]) == (1, 4, 2)
    assert found["accept_length"] == 3.0
    assert found["acceptance_by_position"] == [0.6667, None, None, None]


def test_phases_are_told_to_the_listener_with_the_note_they_began_with():
    timer, heard = PhaseTimer("cpu"), []
    timer.listener = lambda name, seconds, note: heard.append((name, seconds >= 0, note))
    for note, name in (("a", "draft"), ("b", "verify")):
        timer.note = note
        with timer.phase(name):
            pass
    timer.collect()
    assert heard == [("draft", True, "a"), ("verify", True, "b")]


def test_a_lap_runs_from_the_end_of_the_one_before_unless_something_comes_between(monkeypatch):
    ticks = iter([1.0, 3.0, 6.0, 50.0, 51.5])
    monkeypatch.setattr("sglang_sparsespec.metrics.time.perf_counter", lambda: next(ticks))
    timer, heard = PhaseTimer("cpu"), []
    timer.listener = lambda name, seconds, note: heard.append((name, seconds, note))
    for note in "abc":
        timer.note = note
        timer.lap("round")
    timer.break_laps()
    for note in "de":
        timer.note = note
        timer.lap("round")
    assert heard == [("round", 2.0, "b"), ("round", 3.0, "c"), ("round", 1.5, "e")]


def test_outcomes_belong_to_the_oldest_launch():
    """Under overlap the next round is launched before the outcome of this one is known."""
    metrics = AcceptanceMetrics(2)
    metrics.launched([2], [10])
    metrics.launched([1, 2], [20, 30])
    metrics.finished([1])
    assert (metrics.rounds, metrics.drafted, metrics.accepted) == (1, [1, 1], [1, 0])
    metrics.finished([0, 2])
    assert (metrics.rounds, metrics.drafted, metrics.accepted) == (2, [3, 2], [2, 1])
    assert metrics.budget_tokens == 60


def test_a_launch_keeps_its_own_copy():
    metrics, drafted = AcceptanceMetrics(2), [2]
    metrics.launched(drafted, [10])
    drafted[0] = 0
    metrics.finished([1])
    assert metrics.drafted == [1, 1]


def test_an_outcome_of_another_batch_raises():
    metrics = AcceptanceMetrics(2)
    metrics.launched([2, 2], [10, 10])
    with pytest.raises(RuntimeError, match="outcome of 3 requests for a round of 2"):
        metrics.finished([1, 1, 1])


def test_an_outcome_without_a_launch_is_not_counted():
    metrics = AcceptanceMetrics(2)
    metrics.finished([1])
    assert metrics.verifications == 0


PROMETHEUS = """
import json
from prometheus_client import REGISTRY
from sglang_sparsespec.metrics import AcceptanceMetrics
metrics = AcceptanceMetrics(2)
metrics.launched([2], [99])
metrics.finished([2])  # before it was enabled: not exported
metrics.enable_prometheus({"model_name": "m"})
for drafted, accepted in [([2, 1], [1, 1]), ([2], [0]), ([], [])]:
    metrics.launched(drafted, [10 * n for n in drafted])
    metrics.finished(accepted)
found = {}
for family in REGISTRY.collect():
    for sample in family.samples:
        if sample.name.startswith("sparsespec_") and not sample.name.endswith("_created"):
            found["/".join([sample.name, *sample.labels.values()])] = sample.value
print(json.dumps(found))
"""


def test_prometheus_counts_the_same():
    """In a process of its own: counters cannot be registered twice."""
    run = subprocess.run([sys.executable, "-c", PROMETHEUS], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {
        "sparsespec_drafted_tokens_total/m/0": 3,
        "sparsespec_drafted_tokens_total/m/1": 2,
        "sparsespec_accepted_tokens_total/m/0": 2,
        "sparsespec_accepted_tokens_total/m/1": 0,
        "sparsespec_looked_up_tokens_total/m": 0,
        "sparsespec_verifications_total/m": 3,
        "sparsespec_rounds_total/m": 3,
        "sparsespec_budget_tokens/m": 20,  # of the last round that had any
    }


def test_the_timer_means_over_the_phases_it_saw(monkeypatch):
    ticks = iter([1.0, 1.5, 10.0, 11.0, 20.0, 20.25])
    monkeypatch.setattr("sglang_sparsespec.metrics.time.perf_counter", lambda: next(ticks))
    timer = PhaseTimer("cpu")
    assert timer.mean_us("select") == 0.0
    for name in ("select", "select", "other"):
        with timer.phase(name):
            pass
    assert timer.mean_us("select") == pytest.approx(0.75e6)
    assert timer.mean_us("other") == pytest.approx(0.25e6)
    assert timer.mean_us("never") == 0.0


def test_an_error_inside_a_phase_is_not_hidden():
    timer = PhaseTimer("cpu")
    with pytest.raises(KeyError), timer.phase("select"):
        raise KeyError("inside")
