"""What the hooks do, apart from being in place (that is the contract test's)."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct
from sglang_sparsespec import compat, plugin
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.hooks import HookType, _settle_first, scheduler_hooks


def batch(*finished):
    return SimpleNamespace(reqs=[SimpleNamespace(finished=lambda own=own: own) for own in finished])


def scheduler(running=(), last=None, queued=None, **others):
    """As much of SGLang's as is looked at. queued: none without overlap."""
    fields = {"_engine_paused": False, "waiting_queue": [], "chunked_req": None, "last_batch": last}
    fields["is_fully_idle"] = lambda ignore_waiting: not (running or last or (queued and queued.reqs))
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


RELEASE = io_struct.ReleaseMemoryOccupationReqInput()


def test_memory_is_released_once_nothing_runs_and_others_do_not_wait_for_that():
    busy = scheduler(running=(False,))
    assert dispatched(busy, RELEASE, "continue") == ["continue"]
    assert dispatched(busy, "more") == ["more"]
    for name, value in vars(scheduler()).items():
        setattr(busy, name, value)
    assert dispatched(busy, "last") == [RELEASE, "last"]
    assert dispatched(busy) == []


def test_a_request_that_comes_right_before_a_release_is_waited_for():
    found, done = scheduler(), []

    def process(owner, some):
        done.extend(some)
        if "request" in some:
            owner.is_fully_idle = lambda ignore_waiting: False

    _settle_first(process, found, ["request", RELEASE])
    assert done == ["request"]


class Updater:
    """SGLang's part: it pauses and resumes regions, and breaks where a region is not as it should be."""

    def __init__(self):
        self.offload_tags, self.flushes = set(), 0

    def flush_cache(self):
        self.flushes += 1

    def release(self, message):
        assert not self.offload_tags & set(message.tags)
        self.offload_tags |= set(message.tags)
        return "released"

    def resume(self, message):
        self.offload_tags = self.offload_tags - set(message.tags)
        return "resumed"


ALL = {"kv_cache", "weights", "cuda_graph"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_memory_is_released_and_resumed_once(device):
    updater = Updater()
    release, resume = io_struct.ReleaseMemoryOccupationReqInput, io_struct.ResumeMemoryOccupationReqInput

    def change(message):
        function = Updater.release if isinstance(message, release) else Updater.resume
        return compat.change_memory(function, updater, message, device=device)

    for message, left in (
        (resume(), set()),
        (release(tags=["weights"]), {"weights"}),
        (release(), ALL),
        (release(tags=["kv_cache", "nothing"]), ALL),
        (resume(tags=["kv_cache"]), ALL - {"kv_cache"}),
        (resume(tags=["kv_cache"]), ALL - {"kv_cache"}),
        (resume(tags=[]), set()),
        (resume(), set()),
    ):
        assert change(message) is not None
        assert updater.offload_tags == left
    assert updater.flushes == (device == "cpu")


def test_a_process_that_outlived_its_server_ends(monkeypatch):
    gone = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: gone)
    with pytest.raises(SystemExit, match="server ended"):
        plugin.register()


@pytest.mark.parametrize(
    "change", ["update_weights_from_disk", "update_weights_from_ipc", "end_weight_update"]
)
def test_copies_for_drafts_follow_an_update_that_does_not_flush(change):
    seen = []
    updater = SimpleNamespace(
        draft_worker=SimpleNamespace(refresh_draft_weights=lambda: seen.append("refreshed"))
    )
    (hook,) = (hook for hook in scheduler_hooks(SparseSpecConfig(), "cpu") if hook.target.endswith(change))

    def update(updater, message):
        seen.append("updated")
        return "reply"

    first = update if hook.kind == HookType.AROUND else update(updater, UPDATE)
    assert hook.function(first, updater, UPDATE) == "reply"
    assert seen == ["updated", "refreshed"]
