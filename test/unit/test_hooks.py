"""What the hooks do, apart from being in place (that is the contract test's)."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct
from sglang_sparsespec.hooks import _settle_first


def batch(*finished):
    return SimpleNamespace(reqs=[SimpleNamespace(finished=lambda own=own: own) for own in finished])


def scheduler(running=(), last=None, queued=None, **others):
    """As much of SGLang's as is looked at. queued: none without overlap."""
    fields = {"_engine_paused": False, "waiting_queue": [], "chunked_req": None, "last_batch": last}
    fields |= {} if queued is None else {"result_queue": [(queued, None)]}
    return SimpleNamespace(**{**fields, "running_batch": batch(*running), **others})


def dispatched(scheduler, *messages):
    done = []
    _settle_first(lambda owner, some: done.extend(some), scheduler, list(messages))
    return done


UPDATE = io_struct.UpdateWeightFromDiskReqInput(model_path="m")
IDLE_WANTED = [
    UPDATE,
    io_struct.FlushCacheReqInput(),
    io_struct.ReleaseMemoryOccupationReqInput(),
    io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[]),
]


@pytest.mark.parametrize("message", IDLE_WANTED, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize(
    "busy",
    [
        {"running": (True,)},
        {"last": batch(True)},
        {"running": (True, True), "last": batch(True), "queued": batch(True)},
    ],
    ids=["running", "last", "queued"],
)
def test_what_wants_an_idle_scheduler_waits_for_rounds_of_ended_requests(message, busy):
    found = scheduler(**busy)
    assert dispatched(found, "before", message, "after") == ["before"]
    assert dispatched(found) == []  # still the same round
    for name, value in vars(scheduler(queued=batch())).items():
        setattr(found, name, value)
    assert dispatched(found, "later") == [message, "after", "later"]
    assert dispatched(found) == []


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"running": (False, True)},
        {"running": (True,), "last": batch(False)},
        {"running": (True,), "queued": batch(False)},
        {"running": (True,), "waiting_queue": [1]},
        {"running": (True,), "chunked_req": 1},
        {"running": (True,), "_engine_paused": True},
    ],
    ids=["idle", "running", "last", "queued", "waiting", "chunked", "paused"],
)
def test_it_does_not_wait_for_what_still_runs(others):
    """SGLang refuses or fails the message then, as without us; and a paused engine ends no round."""
    messages = ["before", UPDATE, "after"]
    assert dispatched(scheduler(**others), *messages) == messages


@pytest.mark.parametrize(
    "message",
    [
        io_struct.UpdateWeightFromDiskReqInput(model_path="m", flush_cache=False),
        io_struct.AbortReq(),
        io_struct.PauseGenerationReqInput(mode="in_place"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_else_waits(message):
    assert dispatched(scheduler(running=(True,)), message) == [message]
