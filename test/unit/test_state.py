"""The device state of requests, and the micro-steps laid out from it, against loops over Python lists."""

import pytest
import torch
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.batch import RoundInputs, build_micro_step
from sglang_sparsespec.rounds.planner import DraftRow, MicroStep, RequestKey, RoundPlanner, VerifyRow
from sglang_sparsespec.rounds.state import RequestState

ROWS, STRIDE, SUPPORT, LAYERS, HEADS, SELECTED = 9, 3, 5, 2, 2, 40


def make_state():
    return RequestState(
        rows=ROWS,
        stride=STRIDE,
        support=SUPPORT,
        layers=LAYERS,
        heads=HEADS,
        max_selected=SELECTED,
        device="cpu",
    )


def tensors(state):
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


# --- state ---


def test_the_state_has_the_shapes_that_it_documents():
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors(make_state()).items()}
    assert shapes == {
        "tokens": ((ROWS, STRIDE + 1), torch.int64),
        "support_ids": ((ROWS, STRIDE, SUPPORT), torch.int64),
        "support_probs": ((ROWS, STRIDE, SUPPORT), torch.float32),
        "selected": ((LAYERS, HEADS, ROWS, SELECTED), torch.int32),
        "committed": ((ROWS,), torch.int64),
        "selected_len": ((ROWS,), torch.int64),
        "selected_base": ((ROWS,), torch.int64),
    }


def test_nbytes_counts_every_tensor():
    state = make_state()
    assert state.nbytes == sum(t.numel() * t.element_size() for t in tensors(state).values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_begin_writes_the_committed_token_of_its_rows_only(dtype):
    state = make_state()
    state.tokens.fill_(-1)
    state.begin(torch.tensor([5, 2]), torch.tensor([70, 71], dtype=dtype))
    expected = torch.full((ROWS, STRIDE + 1), -1)
    expected[5, 0], expected[2, 0] = 70, 71
    assert torch.equal(state.tokens, expected)


def test_zero_clears_every_tensor():
    state = make_state()
    for tensor in tensors(state).values():
        tensor.fill_(3)
    state.zero()
    assert all((tensor == 0).all() for tensor in tensors(state).values())


# --- micro-steps ---

POOLS = [4, 1, 7, 2]
COMMITTED = [30, 11, 52, 9]


def round_of(budget=6, context=80):
    """State, inputs and page table of four requests; every value tells where it stands."""
    config = SparseSpecConfig(stride=STRIDE, min_tokens=budget, budget_ratio=0.001, sink=0)
    state = make_state()
    state.tokens = torch.arange(ROWS)[:, None] * 100 + torch.arange(STRIDE + 1)
    for pool, committed in zip(POOLS, COMMITTED, strict=True):
        state.selected_base[pool] = committed - 2
        state.selected_len[pool] = min(budget, committed - 2)
    table = (torch.arange(ROWS)[:, None] * 1000 + torch.arange(context)).to(torch.int32)
    bases = [committed - 2 for committed in COMMITTED]
    inputs = RoundInputs(torch.tensor(POOLS), torch.tensor(COMMITTED), list(COMMITTED), bases)
    return config, state, inputs, table


STEPS = {
    "drafts": MicroStep((DraftRow(0, 0), DraftRow(1, 2), DraftRow(3, 1)), ()),
    "verifies": MicroStep((), (VerifyRow(2, 3), VerifyRow(0, 3), VerifyRow(1, 3))),
    "ragged": MicroStep((), (VerifyRow(0, 0), VerifyRow(1, 3), VerifyRow(2, 1))),
    "mixed": MicroStep((DraftRow(1, 0), DraftRow(2, 2)), (VerifyRow(0, 2), VerifyRow(3, 0))),
}


@pytest.fixture(params=STEPS, ids=list(STEPS))
def step(request):
    return STEPS[request.param]


def build(step):
    config, state, inputs, table = round_of()
    return build_micro_step(step, inputs, state, config, table, set())


def test_tokens_positions_and_slots_are_those_of_the_loop(step):
    expected = []  # request, position, place among the request's tokens
    for row in step.drafts:
        expected.append((row.row, COMMITTED[row.row] + row.drafted, row.drafted))
    for row in step.verifies:
        expected += [(row.row, COMMITTED[row.row] + t, t) for t in range(row.drafted + 1)]
    micro = build(step)
    assert micro.positions.tolist() == [position for _, position, _ in expected]
    assert micro.input_ids.tolist() == [POOLS[row] * 100 + at for row, _, at in expected]
    assert micro.out_cache_loc.tolist() == [POOLS[row] * 1000 + position for row, position, _ in expected]
    assert {micro.positions.dtype, micro.input_ids.dtype, micro.out_cache_loc.dtype} == {torch.int64}


def test_rows_know_their_pool_and_what_stands_before_them(step):
    micro = build(step)
    rows = (*step.drafts, *step.verifies)
    assert micro.row_pools.tolist() == [POOLS[row.row] for row in rows]
    assert micro.row_prefix.tolist() == [COMMITTED[row.row] + row.drafted for row in step.drafts] + [
        COMMITTED[row.row] for row in step.verifies
    ]
    assert micro.draft_requests.tolist() == [row.row for row in step.drafts]
    assert micro.draft_at.tolist() == [row.drafted for row in step.drafts]
    assert micro.verify_requests.tolist() == [row.row for row in step.verifies]
    assert micro.draft_count == len(step.drafts)


def test_draft_rows_attend_to_their_selection_and_all_since(step):
    _, state, _, _ = round_of()
    micro = build(step)
    if not step.drafts:
        assert micro.drafts is None
        return
    lengths = [
        int(state.selected_len[POOLS[row.row]]) + 2 + row.drafted + 1 for row in step.drafts
    ]  # base stands 2 before the committed length
    assert micro.drafts.lengths.tolist() == lengths
    assert micro.drafts.exact
    assert list(micro.drafts.bounds) == lengths
    assert micro.drafts.width == max(micro.drafts.bounds)
    assert len(micro.drafts) == len(step.drafts)


def test_verify_rows_are_padded_to_the_stride_with_their_last_query(step):
    micro = build(step)
    if not step.verifies:
        assert micro.verifies is None
        return
    tokens = [(r, t) for r, row in enumerate(step.verifies) for t in range(row.drafted + 1)]
    padded = [
        [tokens.index((r, min(t, row.drafted))) for t in range(STRIDE + 1)]
        for r, row in enumerate(step.verifies)
    ]
    assert micro.verify_gather.tolist() == padded
    assert micro.verify_flat.tolist() == [r * (STRIDE + 1) + t for r, t in tokens]
    assert micro.verifies.first.tolist() == list(micro.verifies.first_cpu)
    assert micro.verifies.queries.tolist() == [row.drafted + 1 for row in step.verifies]
    assert micro.verifies.padded_queries == STRIDE + 1
    assert micro.verifies.width == max(COMMITTED[row.row] for row in step.verifies) + STRIDE + 1
    # Padding and unpadding a token's value gives it back.
    values = torch.arange(len(tokens))
    assert torch.equal(values[micro.verify_gather].flatten()[micro.verify_flat], values)


@pytest.mark.parametrize("schedule", ["lockstep", "unified"])
@pytest.mark.parametrize("ratio", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("accepts", [0, STRIDE])
def test_the_host_bound_of_a_draft_row_holds_over_whole_rounds(schedule, ratio, accepts):
    """The host sees lengths at the start of a round only; what it claims must hold for all that follows."""
    config = SparseSpecConfig(stride=STRIDE, min_tokens=4, budget_ratio=ratio, sink=1, recent=2)
    state, planner = make_state(), RoundPlanner(STRIDE, schedule)
    table = torch.zeros(ROWS, 400, dtype=torch.int32)
    inputs = RoundInputs(torch.tensor(POOLS), torch.tensor(COMMITTED), list(COMMITTED), list(COMMITTED))
    bases = list(COMMITTED)
    state.selected_base[inputs.pools] = inputs.committed
    state.selected_len[inputs.pools] = torch.tensor([min(config.budget(n), SELECTED) for n in COMMITTED])
    for _ in range(12):
        inputs = RoundInputs(inputs.pools, inputs.committed, inputs.committed.tolist(), bases)
        verified = set()
        for step in planner.plan_round([RequestKey(pool, 0) for pool in POOLS]).micro_steps:
            micro = build_micro_step(step, inputs, state, config, table, verified)
            if micro.drafts is not None:
                lengths, bounds = micro.drafts.lengths.tolist(), list(micro.drafts.bounds)
                assert all(0 < length <= bound for length, bound in zip(lengths, bounds, strict=True))
                assert micro.drafts.exact == (verified.isdisjoint(row.row for row in step.drafts))
                assert not micro.drafts.exact or lengths == bounds
            for row in step.verifies:
                first = int(inputs.committed[row.row])
                assert micro.verifies.first_cpu[step.verifies.index(row)] == first
                verified.add(row.row)
                state.selected_base[POOLS[row.row]] = first
                state.selected_len[POOLS[row.row]] = min(config.budget(first), SELECTED)
                inputs.committed[row.row] += min(accepts, row.drafted) + 1
        bases = list(inputs.committed_cpu)
