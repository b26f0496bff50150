"""Rounds of the CUDA-graph path on the CPU, on kernel references: the output is that of plain decoding."""

import dataclasses
import random

import pytest
import torch
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged import ScoredRows, ScoreTarget
from sglang_sparsespec.attention.paged_reference import TorchPagedAttention
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.rounds.graphs import GraphKey, plan_keys, verify_widths
from sglang_sparsespec.rounds.planner import RequestKey, RoundPlanner
from toy_rounds import SLOTS, Toy

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = SparseSpecConfig(stride=4, min_tokens=32, draft_support=8)
CONFIGS = {
    "lockstep": {},
    "unified": {"schedule": "unified"},
    "kv_head": {"index_scope": "kv_head", "schedule": "unified"},
    "window": {"selector": "window", "sink": 3},
    "random": {"selector": "random"},
    "shared": {"score_layer_stride": 2, "score_every": 3, "schedule": "unified"},
    "k1": {"stride": 1},
    "recent": {"recent": 9, "sink": 0},
}


class Separate(TorchPagedAttention):
    """Scores in a pass of its own, as FA3 does."""

    fuses_scores = False


def tokens_of(toy: Toy, rounds: int, seed: int = 3) -> dict[int, list[int]]:
    """What requests emit over some rounds, the batch shrinking from all to two."""
    rng = random.Random(seed)
    pools = list(range(1, SLOTS + 1))
    out: dict[int, list[int]] = {pool: [] for pool in pools}
    for at in range(rounds):
        rng.shuffle(pools)
        for pool, tokens in zip(pools, toy.run(pools), strict=True):
            out[pool] += tokens
        if at % 2 and len(pools) > 2:
            pools.pop()
    return out


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_rounds_emit_what_plain_decoding_does(name, attention):
    config = dataclasses.replace(BASE, **CONFIGS[name])
    found = tokens_of(Toy(config, attention()), rounds=4)
    plain = Toy(config, attention())
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("windows", [{}, {0: 40}, {1: 15, 2: 999}, {0: 15, 2: 40}])
@pytest.mark.parametrize("name", ["lockstep", "kv_head", "shared"])
def test_layers_with_windows_and_sinks_emit_what_plain_decoding_does(name, windows, sinks, attention):
    model = {"windows": windows, "sinks": sinks}
    config = dataclasses.replace(BASE, **CONFIGS[name])
    found = tokens_of(Toy(config, attention(), **model), rounds=3)
    plain = Toy(config, attention(), **model)
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


def test_drafts_of_layers_with_windows_and_sinks_are_right_where_selections_keep_all():
    """Acceptance shows what drafts attend to: they are wrong where they leave a window or the sinks out."""
    config = dataclasses.replace(BASE, budget_ratio=1.0)
    for windows, sinks in (({0: 40}, False), ({1: 15}, True), ({}, True)):
        toy = Toy(config, TorchPagedAttention(), windows=windows, sinks=sinks)
        assert [len(row) for row in toy.run([1, 2, 3])] == [5, 5, 5]


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
@pytest.mark.parametrize("name", ["lockstep", "kv_head", "window", "recent"])
def test_rounds_of_any_number_of_drafts_emit_what_plain_decoding_does(name, attention):
    config = dataclasses.replace(BASE, **{**CONFIGS[name], "schedule": "lockstep"})
    toy, rng = Toy(config, attention()), random.Random(5)
    found: dict[int, list[int]] = {pool: [] for pool in range(1, SLOTS + 1)}
    for drafts in (0, 4, 2, 0, 0, 1, 3, 4, 0, 2):
        pools = rng.sample(sorted(found), rng.randint(2, SLOTS))
        rows = toy.run(pools, drafts=drafts)
        assert all(1 <= len(row) <= drafts + 1 for row in rows)
        for pool, tokens in zip(pools, rows, strict=True):
            found[pool] += tokens
    plain = Toy(config, attention())
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
def test_schedules_may_change_from_round_to_round(attention):
    config = dataclasses.replace(BASE, schedule="auto", adapt="on")
    toy, rng = Toy(config, attention()), random.Random(6)
    found: dict[int, list[int]] = {pool: [] for pool in range(1, SLOTS + 1)}
    for drafts, unified in ((4, False), (4, True), (4, True), (0, False), (4, True), (2, False), (4, True)):
        pools = rng.sample(sorted(found), SLOTS)
        for pool, tokens in zip(pools, toy.run(pools, drafts=drafts, unified=unified), strict=True):
            found[pool] += tokens
    plain = Toy(config, attention())
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


def test_a_micro_step_in_which_nobody_has_anything_to_do_runs_nothing():
    config = dataclasses.replace(BASE, schedule="auto", adapt="on")
    toy = Toy(config, TorchPagedAttention())
    # Offsets 4, 3, 2, 1, 0: the last request has four drafts waiting afterwards.
    found = toy.run([1, 2, 3, 4, 5], unified=True)[4]
    before = toy.rounds.eager_micro_steps
    found += toy.run([5], drafts=4, unified=False)[0]
    assert toy.rounds.eager_micro_steps == before + 1, "the verification alone"
    found += toy.run([5], drafts=4, unified=False)[0]
    assert found == Toy(config, TorchPagedAttention()).plain(5, len(found))


def test_unified_micro_steps_always_have_a_graph():
    for count in (1, 5, 8, 9, 10, 17, 31, 32):
        keys, _ = plan_keys([1, 2, 4, 8, 16, 32], stride=8, schedule="unified", score_every=1)
        planner, rng = RoundPlanner(8, "unified"), random.Random(count)
        pools = list(range(1, count + 1))
        while pools:
            for step in planner.plan_round([RequestKey(pool, 0) for pool in pools]).micro_steps:
                wanted = (len(step.drafts), len(step.verifies))
                assert any(key.nd >= wanted[0] and key.nv >= wanted[1] for key in keys), wanted
            pools = rng.sample(pools, len(pools) * 2 // 3)


def test_drafts_are_accepted_again_after_a_long_stretch_of_plain_decoding():
    toy = Toy(dataclasses.replace(BASE, budget_ratio=1.0), TorchPagedAttention())
    for _ in range(12):
        assert [len(row) for row in toy.run([1, 2], drafts=0)] == [1, 1]
    toy.run([1, 2], drafts=2)  # the selection is as old as its page tables allow, or older
    assert [len(row) for row in toy.run([1, 2])] == [5, 5]


@pytest.mark.parametrize("schedule", ["lockstep", "unified"])
def test_wrong_drafts_cost_tokens_and_change_none(schedule):
    config = dataclasses.replace(BASE, debug_drafts="wrong", schedule=schedule)
    toy = Toy(config, TorchPagedAttention())
    found = [toy.run([1, 2])[1] for _ in range(3)]
    assert [len(row) for row in found] == [1, 1, 1]
    assert [row[0] for row in found] == Toy(config, TorchPagedAttention()).plain(2, 3)


def test_sampled_rounds_may_be_filled_with_lookups():
    toy = Toy(dataclasses.replace(BASE, lookup="on"), TorchPagedAttention())
    toy.rounds.rounds.history.random_(0, 4)
    for drafts, total in ((1, 4), (4, None), (2, 3), (1, 4)):
        rows = toy.run([2, 5], greedy=False, drafts=drafts, total=total)
        assert all(1 <= len(row) <= (total or drafts) + 1 for row in rows)


def test_sampled_rounds_may_have_any_number_of_drafts():
    toy = Toy(BASE, TorchPagedAttention())
    for drafts in (0, 4, 1, 0, 3):
        assert all(1 <= len(row) <= drafts + 1 for row in toy.run([2, 5], greedy=False, drafts=drafts))


@pytest.mark.parametrize("schedule", ["lockstep", "unified"])
def test_logits_of_verifications_are_kept_in_the_order_of_the_batch(schedule):
    config = dataclasses.replace(BASE, schedule=schedule)
    toy = Toy(config, TorchPagedAttention())
    pools = [5, 2, 4]
    for _ in range(4):
        rows = toy.run(pools, logprobs=True)
        assert toy.logits.shape[:2] == (3, config.stride + 1)
        for row, logits in zip(rows, toy.logits, strict=True):
            assert logits.argmax(dim=-1).tolist()[: len(row)] == row
        pools = pools[::-1]
    toy.run(pools)
    assert toy.logits is None


def test_micro_steps_are_timed_by_width():
    toy = Toy(dataclasses.replace(BASE, adapt="on"), TorchPagedAttention())
    keys, _ = plan_keys([1, SLOTS], stride=4, schedule="lockstep", score_every=1, adapt=True)
    before = {pool: toy.plain(pool, 3) for pool in (1, 2)}
    toy = Toy(dataclasses.replace(BASE, adapt="on"), TorchPagedAttention())
    times = toy.rounds.graphs.measure(keys)
    slots = {width: [slots for slots, _ in points] for width, points in times.items()}
    assert slots == {width: [SLOTS, 1] for width in (0, 1, 3, 5)}
    assert all(us > 0 for points in times.values() for _, us in points)
    assert toy.rounds.eager_micro_steps == 0, "timing does not count"
    for pool, length in toy.committed.items():  # timing forgets all requests
        toy.state.begin_window(torch.tensor([pool]), torch.tensor([length]))
        toy.state.tokens[pool, 0] = pool
    assert toy.run([1, 2], drafts=0) == [before[1][:1], before[2][:1]]


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
def test_a_rank_with_one_kv_head_selects_for_it_alone(attention):
    config = dataclasses.replace(BASE, index_scope="kv_head")
    found = tokens_of(Toy(config, attention(), kv_heads=1), rounds=3)
    plain = Toy(config, attention(), kv_heads=1)
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


def test_a_full_budget_accepts_every_draft():
    toy = Toy(dataclasses.replace(BASE, budget_ratio=1.0), TorchPagedAttention())
    assert all(len(row) == 5 for _ in range(3) for row in toy.run([1, 2, 3]))


def test_wrong_drafts_are_all_refused():
    toy = Toy(dataclasses.replace(BASE, debug_drafts="wrong"), TorchPagedAttention())
    assert all(len(row) == 1 for _ in range(3) for row in toy.run([1, 2, 3]))


@pytest.mark.parametrize("attention", [TorchPagedAttention, Separate])
def test_rows_without_room_for_scores_keep_their_selection_and_stay_right(attention):
    toy = Toy(BASE, attention(), capacity=700)  # two rows of about 300 tokens
    before = toy.state.selected_base.clone()
    found = tokens_of(toy, rounds=4)
    moved = (toy.state.selected_base != before)[1:].sum()
    assert 0 < moved < SLOTS
    plain = Toy(BASE, attention())
    assert found == {pool: plain.plain(pool, len(tokens)) for pool, tokens in found.items()}


def test_sums_are_zero_again_after_a_round():
    toy = Toy(BASE, TorchPagedAttention())
    toy.run([1, 2, 3])
    assert toy.rounds.rounds.fused and not toy.rounds.rounds.sums.any()


def test_selections_of_fused_and_separate_scores_mostly_agree():
    toys = [Toy(BASE, kind()) for kind in (TorchPagedAttention, Separate)]
    for toy in toys:
        for _ in range(3):
            toy.run([1, 2, 3, 4])
    for pool in (1, 2, 3, 4):
        lengths = [int(toy.state.selected_len[pool]) for toy in toys]
        sets = [
            set(toy.state.selected[0, 0, pool, :n].tolist()) for toy, n in zip(toys, lengths, strict=True)
        ]
        assert len(sets[0] & sets[1]) >= 0.6 * min(lengths)


@pytest.mark.parametrize("schedule", ["lockstep", "unified"])
def test_seeded_rounds_emit_what_plain_decoding_with_the_seed_does(schedule):
    config = dataclasses.replace(BASE, schedule=schedule, draft_support=32)
    seeds = {1: 5, 4: -7, 3: None}
    wanted = {
        pool: Toy(config, TorchPagedAttention()).plain(pool, 24, seed) for pool, seed in seeds.items() if seed
    }
    toy, found = Toy(config, TorchPagedAttention()), {pool: [] for pool in seeds}
    pools = [1, 3, 4]
    for _ in range(24):
        for pool, row in zip(pools, toy.run(pools, seeds=[seeds[p] for p in pools]), strict=True):
            found[pool] += row
        pools = pools[::-1]
    assert {pool: found[pool][:24] for pool in wanted} == wanted
    assert len(found[1]) + len(found[4]) > 2.2 * 24, "some drafts stand"


@pytest.mark.parametrize("kind", ["greedy", "seeded", "fused"])
def test_rounds_filled_with_lookups_emit_what_plain_decoding_does(kind):
    """What a request will put out stands in its context already, behind the same tokens, and mostly right."""
    config = dataclasses.replace(BASE, lookup="on", draft_support=32)
    attention = Separate() if kind == "greedy" else TorchPagedAttention()
    seeds = {1: 5, 4: -7} if kind == "seeded" else {1: None, 4: None}
    toy = Toy(config, attention)
    wanted = {pool: Toy(config, attention).plain(pool, 24, seed) for pool, seed in seeds.items()}
    for pool, tokens in wanted.items():
        length = toy.committed[pool]
        past = torch.randint(0, 40, (length,), dtype=torch.int32)
        chain = [*past[-4:].tolist(), pool, *tokens]
        past[20 : 20 + len(chain)] = torch.tensor(chain, dtype=torch.int32)
        past[34] = 39 - past[34]  # once it is wrong
        toy.rounds.rounds.history[pool, :length] = past
        toy.rounds.rounds.history[pool, length] = pool
    found, rounds = {pool: [] for pool in seeds}, 0
    while min(map(len, found.values())) < 24:
        given = [seeds[pool] for pool in found] if kind == "seeded" else None
        drafts, total = [(1, 4), (2, 4), (3, None), (1, 2), (0, None)][rounds % 5]
        for pool, row in zip(
            found, toy.run(list(found), drafts=drafts, total=total, seeds=given), strict=True
        ):
            found[pool] += row
            at = toy.committed[pool]
            assert toy.rounds.rounds.history[pool, at + 1 - len(row) : at + 1].tolist() == row
        rounds += 1
    assert {pool: row[:24] for pool, row in found.items()} == wanted
    assert rounds < 16, "lookups are accepted"


def test_a_sampled_round_emits_at_least_one_token():
    toy = Toy(BASE, TorchPagedAttention())
    for _ in range(3):
        assert all(1 <= len(row) <= 5 for row in toy.run([2, 5], greedy=False))


def test_scored_verification_adds_clamped_probabilities():
    torch.manual_seed(2)
    q, k, v = torch.randn(4, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    layer = LayerKV(index=0, k=k, v=v, scale=0.25, heads=4)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    pages = torch.arange(30, dtype=torch.int32)[None]
    rows = ScoredRows(ints(1), ints(20), ints(3), ints(20), torch.tensor([2]), queries=4)
    lse = torch.full((1, 4, 4), float("-inf"))
    lse[0, :2] = 1.0  # the last real query has no estimate
    sums = torch.zeros(40, dtype=torch.int32)
    out, lse = TorchPagedAttention().verify_scored(layer, q, pages, rows, ScoreTarget(sums, lse, 16, "layer"))
    want = torch.zeros(20)
    for t in range(2):
        for head in range(4):
            want += torch.exp(k[:20, head // 2] @ q[t, head] * 0.25 - 1.0).clamp(max=1.0)
    assert (sums[2:22] / 2**16 - want).abs().max() < 1e-4
    assert not sums[:2].any() and not sums[22:].any()
    assert not out[3].any()


# --- graph sizes ---


def test_lockstep_needs_two_graphs_a_size_and_unified_mixes():
    keys, sizes = plan_keys([1, 4, 2, 4], stride=8, schedule="lockstep", score_every=1)
    assert sizes == [1, 2, 4]
    assert set(keys) == {GraphKey(n, 0, False) for n in sizes} | {GraphKey(0, n, True, 9) for n in sizes}
    assert keys[0] == GraphKey(0, 4, True, 9), "the largest first"
    keys, _ = plan_keys([32], stride=8, schedule="unified", score_every=2)
    assert {(key.nd, key.nv) for key in keys} == {(32, 0), (32, 5)}
    assert {key.scored for key in keys if key.nv} == {True, False}


def test_rounds_that_adapt_have_narrow_verifications_too():
    keys, _ = plan_keys([2], stride=8, schedule="lockstep", score_every=1, adapt=True)
    assert set(keys) == {
        GraphKey(2, 0, False),
        GraphKey(0, 2, False, 1),  # plain decoding
        GraphKey(0, 2, True, 5),
        GraphKey(0, 2, True, 9),
    }
    assert [verify_widths(k, adapt=True) for k in (1, 2, 3, 6)] == [[1, 2], [1, 2, 3], [1, 2, 4], [1, 4, 7]]
    assert verify_widths(6, adapt=False) == [7]
