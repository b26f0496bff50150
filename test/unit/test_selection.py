"""Selectors against a slow, obvious loop over one row and one head at a time."""

import random

import pytest
import torch
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.selection import make_selector
from sglang_sparsespec.selection.pillar import PillarSelector
from sglang_sparsespec.selection.random import RandomSelector
from sglang_sparsespec.selection.window import WindowSelector

SELECTORS = ("pillar", "window", "random")
CONFIGS = {
    "plain": {"sink": 0, "recent": 0, "min_tokens": 5},
    "sinks": {"sink": 4, "recent": 0, "min_tokens": 3},
    "recent": {"sink": 0, "recent": 6, "min_tokens": 3},
    "both": {"sink": 3, "recent": 4, "min_tokens": 1},
    "ratio": {"sink": 2, "recent": 2, "min_tokens": 1, "budget_ratio": 0.5},
    "all": {"sink": 1, "recent": 1, "min_tokens": 1, "budget_ratio": 1.0},
}
PREFIXES = [1, 2, 5, 17, 40, 64, 33]
WIDTH = 68


def config_of(selector, name):
    return SparseSpecConfig(selector=selector, **{"budget_ratio": 0.001, **CONFIGS[name]})


def scores_of(heads, levels=6, seed=0):
    """Scores with many ties; what stands beyond a prefix is larger than all that stands in it."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (len(PREFIXES), heads, WIDTH), generator=generator).float() / levels
    beyond = torch.arange(WIDTH) >= torch.tensor(PREFIXES)[:, None, None]
    return scores.masked_fill(beyond, 9.0)


def reference(rank, prefix, config, capacity):
    """Positions of one row and head, by sorting tuples."""
    budget = min(config.budget(prefix), capacity)

    def key(position):
        forced = position < config.sink or position >= prefix - config.recent
        return (not forced, 0.0 if forced else -float(rank[position]), position)

    return sorted(sorted(range(prefix), key=key)[:budget])


def check(positions, counts, ranks, config, capacity, width=WIDTH):
    assert positions.dtype == torch.int32
    assert positions.shape == (len(PREFIXES), ranks.shape[1], min(capacity, width))
    for row, prefix in enumerate(PREFIXES):
        count = int(counts[row])
        assert count == min(config.budget(prefix), capacity)
        for head in range(ranks.shape[1]):
            chosen = positions[row, head].tolist()
            assert chosen[:count] == reference(ranks[row, head], prefix, config, capacity)
            assert set(chosen[count:]) <= {width}


def select(selector, scores, capacity, width=WIDTH):
    return selector.select(scores, torch.tensor(PREFIXES), width=width, capacity=capacity)


@pytest.mark.parametrize("capacity", [3, 12, 200])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_pillar_keeps_the_highest_scores_and_the_earliest_of_equals(name, heads, capacity):
    config, scores = config_of("pillar", name), scores_of(heads)
    positions, counts = select(PillarSelector(config), scores, capacity)
    check(positions, counts, scores, config, capacity)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pillar_takes_scores_of_any_dtype(dtype):
    config, scores = config_of("pillar", "both"), scores_of(2).to(dtype)
    check(*select(PillarSelector(config), scores, 12), scores, config, 12)


def test_pillar_needs_scores():
    with pytest.raises(ValueError, match="needs the scores"):
        select(PillarSelector(config_of("pillar", "plain")), None, 12)


def test_pillar_keeps_the_first_tokens_where_all_scores_are_equal():
    config = config_of("pillar", "plain")
    positions, counts = select(PillarSelector(config), torch.zeros(len(PREFIXES), 1, WIDTH), 12)
    for row, count in enumerate(counts.tolist()):
        assert positions[row, 0, :count].tolist() == list(range(count))


@pytest.mark.parametrize("capacity", [3, 12, 200])
@pytest.mark.parametrize("name", CONFIGS)
def test_window_is_sinks_and_the_last_tokens(name, capacity):
    config = config_of("window", name)
    positions, counts = select(WindowSelector(config), None, capacity)
    ranks = torch.arange(WIDTH).expand(len(PREFIXES), 1, WIDTH)
    check(positions, counts, ranks, config, capacity)
    if capacity == 200:
        for row, prefix in enumerate(PREFIXES):
            count = config.budget(prefix)
            sinks = list(range(min(config.sink, count)))
            expected = sinks + list(range(prefix - count + len(sinks), prefix))
            assert positions[row, 0, :count].tolist() == expected


@pytest.mark.parametrize("capacity", [3, 12, 200])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_ranks_by_its_own_generator(name, capacity):
    config, twin = config_of("random", name), RandomSelector(config_of("random", name), seed=5)
    positions, counts = select(RandomSelector(config, seed=5), None, capacity)
    ranks = twin.rank(None, torch.tensor(PREFIXES), WIDTH)
    check(positions, counts, ranks, config, capacity)


def test_random_repeats_by_seed_and_changes_from_call_to_call():
    config = config_of("random", "plain")
    first, again = RandomSelector(config, seed=1), RandomSelector(config, seed=1)
    other = RandomSelector(config, seed=2)
    sequence = [select(first, None, 12)[0] for _ in range(3)]
    assert all(torch.equal(positions, select(again, None, 12)[0]) for positions in sequence)
    assert not torch.equal(sequence[0], sequence[1])
    assert not torch.equal(sequence[0], select(other, None, 12)[0])


def test_random_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    select(RandomSelector(config_of("random", "plain"), seed=1), None, 12)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("seed", range(3))
def test_positions_are_ascending_unique_and_inside_the_prefix(selector, seed):
    choice = random.Random(seed)
    config = SparseSpecConfig(
        selector=selector,
        budget_ratio=choice.random() + 0.001,
        min_tokens=choice.randint(1, 30),
        sink=choice.randint(0, 5),
        recent=choice.randint(0, 5),
    )
    positions, counts = select(make_selector(config, seed=seed), scores_of(3, seed=seed), 50)
    for row, prefix in enumerate(PREFIXES):
        for chosen in positions[row, :, : counts[row]].tolist():
            assert chosen == sorted(set(chosen))
            assert chosen[0] >= 0
            assert chosen[-1] < prefix


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("ratio", [1e-6, 0.013, 0.05, 1 / 3, 0.999999, 1.0])
@pytest.mark.parametrize("kept", [(0, 0), (4, 0), (4, 32)])
def test_the_budget_of_the_device_is_that_of_the_host(selector, ratio, kept):
    config = SparseSpecConfig(
        selector=selector, budget_ratio=ratio, min_tokens=64, sink=kept[0], recent=kept[1]
    )
    lengths = [*range(1, 2000), *range(2000, 200_000, 777), 10**6, 10**7 + 1]
    budgets = make_selector(config).budgets(torch.tensor(lengths))
    assert budgets.dtype == torch.int64
    assert budgets.tolist() == [config.budget(length) for length in lengths]


@pytest.mark.parametrize("selector", ["pillar", "window"])
def test_a_row_does_not_depend_on_its_neighbours(selector):
    """Nor on the width of the launch: batches of any composition must select alike."""
    config = config_of(selector, "both")
    scores = scores_of(2)
    together, counts = select(make_selector(config), scores, 12)
    for row, prefix in enumerate(PREFIXES):
        alone, count = make_selector(config).select(
            scores[row : row + 1, :, :prefix], torch.tensor([prefix]), width=prefix, capacity=12
        )
        kept = int(count[0])
        assert kept == int(counts[row])
        assert torch.equal(alone[0, :, :kept], together[row, :, :kept])


@pytest.mark.parametrize(
    ("name", "kind"), [("pillar", PillarSelector), ("window", WindowSelector), ("random", RandomSelector)]
)
def test_selectors_are_made_by_name(name, kind):
    selector = make_selector(SparseSpecConfig(selector=name))
    assert type(selector) is kind
    assert selector.needs_scores == (name == "pillar")
