"""The kernels of a round against their references: same inputs, same effects."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from sgl_kernel_ext import rounds, rounds_reference
from sgl_kernel_ext.buffers import MicroStepBuffers, RequestTensors, RoundBuffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRIDE, SLOTS, ROWS, WIDTH, CAP, GROUPS = 4, 6, 9, 300, 24, 2


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def make_state(rng: random.Random, heads: int = 1) -> RequestTensors:
    torch.manual_seed(rng.randrange(1 << 30))
    committed = torch.randint(40, 200, (ROWS,), device=DEVICE)
    committed[0] = 0
    length = torch.randint(1, CAP + 1, (ROWS,), device=DEVICE)
    base = (committed - torch.randint(0, 12, (ROWS,), device=DEVICE)).clamp(min=0)
    length[0], base[0] = 0, 0
    selected = torch.stack([torch.randperm(40)[:CAP] for _ in range(GROUPS * heads * ROWS)]).to(DEVICE)
    return RequestTensors(
        committed=committed,
        tokens=torch.randint(1, 50, (ROWS, STRIDE + 1), device=DEVICE),
        selected=selected.sort(dim=-1).values.to(torch.int32).view(GROUPS, heads, ROWS, CAP).contiguous(),
        selected_len=length,
        selected_base=base,
        req_to_token=torch.randint(1, 999, (ROWS, WIDTH), dtype=torch.int32, device=DEVICE),
    )


def make_step(
    rng: random.Random, nd: int, nv: int, *, micro: int, greedy: bool = True, queries: int = STRIDE + 1
) -> MicroStepBuffers:
    buffers = RoundBuffers(SLOTS, STRIDE + 1, DEVICE)
    buffers.header[0], buffers.header[1] = micro, int(greedy)
    table = buffers.table
    pools = rng.sample(range(1, ROWS), 8)
    requests = rng.sample(range(SLOTS), SLOTS)
    for slot in range(max(nd - 1, 0)):  # the last slot of each kind stays empty
        table[micro, 0, slot] = torch.tensor([pools.pop(), rng.randrange(STRIDE), requests.pop()])
    for slot in range(max(nv - 1, 0)):
        table[micro, 1, slot] = torch.tensor([pools.pop(), rng.randrange(queries), requests.pop()])
    return buffers.step(nd, nv, queries)


def same(a: object, b: object) -> None:
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right), field.name


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (3, 3), (1, 1), (2, 4)])
@pytest.mark.parametrize("capacity", [10_000, 300])
@pytest.mark.parametrize("queries", [STRIDE + 1, 3, 1])
def test_a_micro_step_is_prepared_as_the_reference_does(
    shape: tuple[int, int], capacity: int, queries: int
) -> None:
    rng = random.Random(f"{shape}{capacity}")
    state, step = make_state(rng), make_step(rng, *shape, micro=2, queries=queries)
    twin = copy.deepcopy(step)
    rounds.prepare(step, state, page_width=CAP + 20, capacity=capacity)
    rounds_reference.prepare(twin, state, page_width=CAP + 20, capacity=capacity)
    same(step, twin)
    if shape[0]:
        assert step.draft_len[-1] == 0 and step.out_cache_loc[shape[0] - 1] == 0
    if shape[1]:
        assert step.seqlens[-1] == 0 and (step.out_cache_loc[-step.queries :] == 0).all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("page_width", [CAP + 20, 8])
def test_page_tables_hold_the_selection_and_everything_since(heads: int, page_width: int) -> None:
    rng = random.Random(heads)
    state, step = make_state(rng, heads), make_step(rng, 4, 3, micro=0)
    rounds_reference.prepare(step, state, page_width=page_width, capacity=10_000)
    got = ints(GROUPS, SLOTS, heads, page_width)
    want = got.clone()
    rounds.draft_pages(step, state, got)
    rounds_reference.draft_pages(step, state, want)
    assert torch.equal(got, want)
    got, want = ints(SLOTS, WIDTH), ints(SLOTS, WIDTH)
    rounds.verify_pages(step, state, got)
    rounds_reference.verify_pages(step, state, want)
    assert torch.equal(got, want)
    assert (got[2] == 0).all(), "an empty slot reads no request's KV"


@pytest.mark.parametrize(
    ("greedy", "queries"), [(True, STRIDE + 1), (False, STRIDE + 1), (True, 3), (True, 1)]
)
def test_greedy_acceptance_is_the_references(greedy: bool, queries: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        state, step = make_state(rng), make_step(rng, 3, 4, micro=1, greedy=greedy, queries=queries)
        twin_state, twin = copy.deepcopy(state), copy.deepcopy(step)
        picked = torch.randint(1, 50, (3 + 4 * step.queries,), device=DEVICE)
        for slot in range(4):  # let some drafts be right
            pool, drafted, _ = step.table[1, 1, slot].tolist()
            right = rng.randrange(drafted + 1)
            at = 3 + slot * step.queries
            picked[at : at + right] = state.tokens[pool, 1 : right + 1]
        outs = [(ints(SLOTS, STRIDE + 1, dtype=torch.int64), ints(SLOTS, dtype=torch.int64)) for _ in "ab"]
        rounds.finish_greedy(step, state, picked, *outs[0])
        rounds_reference.finish_greedy(twin, twin_state, picked, *outs[1])
        same(state, twin_state)
        assert torch.equal(outs[0][1], outs[1][1])
        kept = torch.arange(STRIDE + 1, device=DEVICE) < outs[0][1][:, None]
        assert torch.equal(outs[0][0] * kept, outs[1][0] * kept)
        if not greedy:
            assert (outs[0][1] == 0).all()


@pytest.mark.parametrize("window_sink", [-1, 4])
def test_selections_are_settled_for_scored_rows_only(window_sink: int) -> None:
    state = make_state(random.Random(5))
    twin = copy.deepcopy(state)
    pools = torch.tensor([3, 0, 5, 7], dtype=torch.int32, device=DEVICE)
    prefix = torch.tensor([150_000, 50, 90, 3], dtype=torch.int32, device=DEVICE)
    offset = torch.tensor([0, 64, -1, 128], device=DEVICE)
    options = {"ratio_ppm": 50_000, "min_tokens": 10, "kept": 4, "window_sink": window_sink}
    rounds.settle(pools, prefix, offset, state, **options)
    rounds_reference.settle(pools, prefix, offset, twin, **options)
    same(state, twin)
    assert state.selected_len[7] == 3, "no more than the prefix"
    assert state.selected_base[5] == twin.selected_base[5]


@pytest.mark.parametrize("words", [2, 5, 40])
def test_lookups_continue_the_longest_match_as_the_reference_does(words: int) -> None:
    found = 0
    for seed in range(12):
        rng = random.Random(f"{words}{seed}")
        state, step = make_state(rng), make_step(rng, 2, 4, micro=1)
        state.committed[:] = torch.tensor([0, *(rng.choice([0, 3, 40, 1030, 2500]) for _ in range(ROWS - 1))])
        history = torch.randint(1, words + 1, (ROWS, 2600), dtype=torch.int32, device=DEVICE)
        state.tokens.copy_(torch.randint(1, words + 1, state.tokens.shape))
        for pool in range(ROWS):
            history[pool, state.committed[pool]] = state.tokens[pool, 0]
        if words == 40 and int(state.committed[4]) > 30:  # a chain that repeats itself
            history[4, 11:21] = history[4, int(state.committed[4]) - 9 : int(state.committed[4]) + 1]
        twin_state, twin = copy.deepcopy(state), copy.deepcopy(step)
        most, least = rng.randint(1, STRIDE), rng.choice([1, 3])
        before = step.table.clone()
        rounds.look_up(step, state, history, most=most, least=least)
        rounds_reference.look_up(twin, twin_state, history, most=most, least=least)
        assert torch.equal(step.table, twin.table)
        same(state, twin_state)
        assert torch.equal(step.table[..., [0, 2]], before[..., [0, 2]])
        found += int((step.table != before).sum())
    assert found > (8 if words < 40 else 0)
