"""The select kernel must be exact: the same positions as a stable sort, and nothing else touched."""

import random

import pytest
import torch
from sgl_kernel_ext import reference
from sgl_kernel_ext.select import select

UNTOUCHED = -5


def make_keys(shape, kind, seed):
    """Keys as attention makes them (skewed over exponents), with many ties, all equal, or fixed point."""
    g = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return torch.full(shape, 1234, dtype=torch.int16)
    if kind == "ties":
        return torch.randint(0, 4, shape, generator=g, dtype=torch.int16)
    scores = torch.exp(torch.randn(shape, generator=g) * 3 - 9).clamp(max=1.0)
    if kind == "fixed":
        return (scores * 2**24).to(torch.int32)
    return reference.key16(scores)


def check(keys, prefix, offset, *, device, width=None, tile=16384, state_rows=None, **options):
    """Run kernel and reference from the same state; both the selection and the keys must be equal after."""
    options = {"ratio_ppm": 50_000, "min_tokens": 4, "sink": 2, "recent": 3} | options
    rows = len(prefix)
    state_rows = state_rows or rows + 2
    pools = torch.randperm(state_rows, generator=torch.Generator().manual_seed(rows))[:rows].int().to(device)
    heads = keys.shape[1] if keys.dim() == 3 else 1
    got = torch.full(
        (keys.shape[0], heads, state_rows, width or max(prefix) + 1),
        UNTOUCHED,
        dtype=torch.int32,
        device=device,
    )
    want = got.clone()
    expected_keys = keys.clone().to(device)
    keys = keys.to(device)
    lengths = torch.tensor(prefix, dtype=torch.int32, device=device)
    places = torch.tensor(offset, dtype=torch.int64, device=device)
    select(keys, places, lengths, pools, got, tile=tile, num_warps=4, **options)
    reference.select(expected_keys, places, lengths, pools, want, **options)
    assert torch.equal(got, want)
    assert torch.equal(keys, expected_keys)
    return got


def offsets(prefix, gap=3):
    places, at = [], gap
    for n in prefix:
        places.append(at)
        at += max(n, 0)
    return places, at + gap


@pytest.mark.parametrize(("kind", "heads"), [("scores", None), ("ties", 2), ("equal", None), ("fixed", 2)])
@pytest.mark.parametrize("tile", [64, 1024])
def test_ragged_rows(device, kind, heads, tile):
    """Lines below a quarter, a half and a whole tile, lines of several tiles, empty rows, odd offsets."""
    prefix = [1, 0, 17, 2500, -1, 24, 50, 900]
    places, capacity = offsets(prefix)
    shape = (2, capacity) if heads is None else (1, heads, capacity)
    check(make_keys(shape, kind, 1), prefix, places, device=device, tile=tile)


@pytest.mark.parametrize("capacity", [96, 99, 104])
def test_vector_loads_stay_in_the_buffer(device, capacity):
    """The last row ends with the buffer, whether or not its length allows whole vectors."""
    check(make_keys((3, capacity), "scores", 2), [50, capacity - 51], [1, 51], device=device)


def test_skipped_rows_write_nothing(device):
    got = check(make_keys((1, 64), "scores", 3), [20, 20, 20], [0, -1, 30], device=device)
    assert (got == UNTOUCHED).all(-1).sum() == 3  # two unused state rows and the skipped one


@pytest.mark.parametrize(
    "options",
    [
        {"sink": 0, "recent": 0},
        {"sink": 0, "recent": 0, "min_tokens": 0, "ratio_ppm": 0},
        {"sink": 90, "recent": 50},
        {"sink": 300, "recent": 0},
        {"min_tokens": 1000},
        {"ratio_ppm": 1_000_000},
        {"sink": 7, "recent": 9, "width": 5},
        {"sink": 7, "recent": 9, "width": 12},
        {"sink": 2, "recent": 2, "min_tokens": 40, "width": 16},
    ],
)
@pytest.mark.parametrize("kind", ["scores", "ties"])
def test_budget_and_forced_positions(device, options, kind):
    """Forced positions that overlap, exceed the prefix or the width; no budget; the whole prefix."""
    prefix = [100, 33, 7]
    places, capacity = offsets(prefix)
    check(make_keys((1, capacity), kind, 4), prefix, places, device=device, **options)


@pytest.mark.parametrize("tile", [64, 1024])
@pytest.mark.parametrize("capacity", [120, 3001])
def test_clear_zeroes_exactly_the_keys_of_rows_served(device, tile, capacity):
    places = [1, -1, 70]
    check(
        make_keys((1, 2, capacity), "fixed", 5), [60, 40, capacity - 75], places, device=device, tile=tile,
        clear=True,
    )  # fmt: skip


def test_fixed_point_up_to_the_largest_integer(device):
    keys = torch.tensor(
        [[0, 1, 2, 3, 2**24 + 1, 2**31 - 1, 2**31 - 2, 255, 256, 257, 0, 1]], dtype=torch.int32
    )
    for n in range(1, 12, 2):
        check(keys, [12], [0], device=device, min_tokens=n, sink=0, recent=0)


def test_count_needs_64_bits(device):
    """prefix x ratio_ppm passes 2^31 from 2,148 tokens on."""
    check(make_keys((1, 5000), "scores", 6), [5000], [0], device=device, ratio_ppm=999_999, min_tokens=0)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(device, seed):
    rng = random.Random(seed)
    rows, longest = (rng.randint(1, 4), 700) if device.type == "cpu" else (rng.randint(1, 64), 30_000)
    prefix = [rng.choice([0, rng.randint(1, 40), rng.randint(1, longest)]) for _ in range(rows)]
    if device.type == "cuda":
        prefix[0] = 131_072
    places, capacity = offsets([max(n, 1) for n in prefix], gap=rng.randint(0, 9))
    places = [at if rng.random() > 0.1 else -1 for at in places]
    kind = rng.choice(["scores", "ties", "fixed"])
    check(
        make_keys((rng.randint(1, 2), capacity), kind, seed), prefix, places, device=device,
        ratio_ppm=rng.randint(0, 200_000), min_tokens=rng.randint(0, 30), sink=rng.randint(0, 8),
        recent=rng.randint(0, 8), clear=kind == "fixed" and rng.random() < 0.5,
        tile=rng.choice([1024, 16384]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 100}, "tile is 100"),
        ({"sink": -1}, "none may be negative"),
        ({"ratio_ppm": 2_000_000}, "ratio_ppm is at most 1000000"),
        ({"keys": torch.zeros(1, 8)}, "keys is torch.float32"),
        ({"selected": torch.zeros(2, 1, 1, 4, dtype=torch.int32)}, "1 layers"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    options = {
        "keys": torch.zeros(1, 8, dtype=torch.int16),
        "offset": torch.zeros(1, dtype=torch.int64),
        "prefix": torch.ones(1, dtype=torch.int32),
        "pools": torch.zeros(1, dtype=torch.int32),
        "selected": torch.zeros(1, 1, 1, 4, dtype=torch.int32),
        "ratio_ppm": 1,
        "min_tokens": 1,
        "sink": 0,
        "recent": 0,
    } | change
    with pytest.raises(ValueError, match=message):
        select(**options)
