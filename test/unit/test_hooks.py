"""What the hooks do, apart from being in place (that is the contract test's)."""

import collections
from types import SimpleNamespace

import pytest
from sglang.srt.managers import io_struct
from sglang_sparsespec import compat, plugin
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.hooks import HookType, _settle_first, offload_hooks, scheduler_hooks
from sglang_sparsespec.memory.offload import Offload, Out


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


# --- requests that leave a full pool ---


class Queued:
    """A request as far as the queue goes."""

    finished_reason = None

    def __init__(self, rid):
        self.rid, self.output_ids, self.origin_input_ids = rid, [], [1, 2]
        self.sampling_params = SimpleNamespace(max_new_tokens=90, ignore_eos=False)

    def finished(self):
        return False


@pytest.fixture
def hooked():
    """The decisions, and what stands at each of SGLang's functions, by its last name."""
    offload = Offload(SparseSpecConfig(stride=2, offload="on", admit_ahead=30))
    return offload, {hook.target.rsplit(".", 1)[1]: hook.function for hook in offload_hooks(offload)}


@pytest.mark.parametrize(
    ("policy", "priorities", "wanted"),
    [("fcfs", False, "acb"), ("fcfs", True, "abc"), ("lpm", False, "abc")],
)
def test_who_was_taken_out_waits_before_later_ones_where_the_queue_is_served_in_its_order(
    hooked, policy, priorities, wanted
):
    a, c, b = (Queued(name) for name in "acb")
    owner = scheduler(
        enable_priority_scheduling=priorities, policy=SimpleNamespace(policy=SimpleNamespace(value=policy))
    )
    queue = hooked[1]["_add_request_to_queue"]
    for req in (a, c, b):
        owner.waiting_queue.append(req)
        queue(None, owner, req)
    owner.waiting_queue.remove(c)
    owner.waiting_queue.append(c)
    queue(None, owner, c, is_retracted=True)
    assert "".join(req.rid for req in owner.waiting_queue) == wanted


def test_a_full_queue_refuses_only_who_comes_anew(hooked):
    offload, functions = hooked
    offload.out["a"] = Out(5, 0.0)
    asked = []
    limit = functions["_abort_on_queued_limit"]
    assert limit(lambda *call: asked.append(call) or True, "owner", Queued("a")) is False
    assert limit(lambda *call: asked.append(call) or True, "owner", b := Queued("b")) is True
    assert asked == [("owner", b)]
    functions["_release_aborted_request"](None, "owner", Queued("a"))
    assert not offload.out


@pytest.mark.parametrize("by_priority", [False, True])
def test_victims_are_the_last_to_come_unless_priorities_say_otherwise(hooked, monkeypatch, by_priority):
    monkeypatch.setattr(compat, "takes_victims_by_priority", lambda: by_priority)
    offload, functions = hooked
    reqs = [Queued(name) for name in "abc"]
    for req in (reqs[1], reqs[2], reqs[0]):
        offload.arrived(req)
    order = functions["_get_decode_retraction_order"]([2, 1, 0], reqs)
    assert order == ([2, 1, 0] if by_priority else [1, 2, 0])


def test_admission_counts_on_the_growth_that_is_expected(hooked):
    from sglang.srt.managers import schedule_policy

    before = schedule_policy.CLIP_MAX_NEW_TOKENS
    req = Queued("a")
    req.prefix_len, req.materialized_host_hit_len = 7, lambda: 4
    adder = SimpleNamespace(can_run_list=[])

    def add(adder, req, has_chunked_req, align):
        assert (has_chunked_req, align) == (False, 3)
        seen.append(schedule_policy.CLIP_MAX_NEW_TOKENS)
        if seen[1:]:
            adder.can_run_list.append(req)
        return "verdict"

    seen = []
    offload, functions = hooked
    offload.out["a"] = Out(9, 0.0)
    admit = functions["add_one_req"]
    assert admit(add, adder, req, has_chunked_req=False, align=3) == "verdict"
    assert offload.counts.returns == 0  # it did not fit
    assert admit(add, adder, req, has_chunked_req=False, align=3) == "verdict"
    assert seen == [30, 30] and before == schedule_policy.CLIP_MAX_NEW_TOKENS
    counts = offload.counts
    assert (counts.returns, counts.recomputed, counts.loaded) == (1, 2, 4)
    assert functions["_get_running_request_total_token_offset"](4000.0, adder, req) == 30


def test_kv_of_requests_that_must_stay_out_of_the_tree_stays_out():
    tree = SimpleNamespace(checkpoint=lambda req, up_to: put.append((req, up_to)))
    put = []
    kv = SimpleNamespace(kv_committed_len=50, cache_inserted_len=20)
    req = SimpleNamespace(
        kv=kv, skip_radix_cache_insert=False, finished=lambda: False, refresh_fill_ids=lambda: None
    )
    memory = compat.TreeMemory(tree)
    assert memory.fresh(req) == 30 and memory.length(req) == 50
    memory.checkpoint(req, whole=False)
    assert kv.cache_inserted_len == 20
    memory.checkpoint(req, whole=True)
    assert kv.cache_inserted_len == 0 and put == [(req, 50)] * 2
    req.skip_radix_cache_insert = True
    assert memory.fresh(req) == 0
    memory.checkpoint(req, whole=True)
    assert len(put) == 2


def test_results_that_wait_are_processed_once_and_the_loop_takes_no_more():
    done = []
    owner = SimpleNamespace(
        tree_cache=None,
        result_queue=collections.deque([("batch", "result")]),
        last_batch="batch",
        process_batch_result=lambda *result: done.append(result),
    )
    memory = compat.SchedulerMemory(owner)
    assert memory.process_results() is True
    assert done == [("batch", "result")] and owner.last_batch is None and not owner.result_queue
    owner.last_batch = "another"
    assert memory.process_results() is False and owner.last_batch == "another"
    del owner.result_queue  # without overlap scheduling
    assert memory.process_results() is False
