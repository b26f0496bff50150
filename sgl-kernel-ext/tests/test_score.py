"""The score kernel against float64, and what must hold whatever the scores are."""

import random

import pytest
import torch
from batches import make_batch
from sgl_kernel_ext import reference
from sgl_kernel_ext.score import score_keys

UNTOUCHED = -7


def run(batch, scope="layer", k_scale=1.0, **tunables):
    """Keys of the kernel (UNTOUCHED where it wrote nothing) and float64 scores of the reference."""
    rows = (batch.page_table, batch.first, batch.queries)
    common = {"padded_queries": batch.padded_queries, "scale": batch.scale}
    lse = reference.logsumexp(
        batch.q, batch.k_cache, *rows, padded_queries=batch.padded_queries, scale=batch.scale * k_scale
    )
    lines = () if scope == "layer" else (batch.k_cache.shape[1],)
    capacity = batch.packed + 5
    out = torch.full((*lines, capacity), UNTOUCHED, dtype=torch.int16, device=batch.q.device)
    wide = batch.k_cache if batch.k_cache.dtype.itemsize > 1 else batch.k_cache.float()
    score_keys(
        batch.q, batch.k_cache, lse, *rows, batch.prefix, batch.offset, out,
        scope=scope, k_scale=k_scale, **common, **tunables,
    )  # fmt: skip
    expected = reference.scores(
        batch.q, wide, lse, *rows, batch.prefix, batch.offset,
        scope=scope, k_scale=k_scale, capacity=capacity, **common,
    )  # fmt: skip
    return out, expected


def written(batch, capacity):
    mask = torch.zeros(capacity, dtype=torch.bool, device=batch.q.device)
    for at, n, real in zip(batch.offset.tolist(), batch.prefix.tolist(), batch.queries.tolist(), strict=True):
        if at >= 0 and real > 0:
            mask[at : at + n] = True
    return mask


def check(batch, scope="layer", **options):
    out, expected = run(batch, scope, **options)
    mask = written(batch, out.shape[-1])
    assert (out[..., ~mask] == UNTOUCHED).all(), "wrote outside the rows' keys"
    got, want = out[..., mask].int(), reference.key16(expected)[..., mask].int()
    assert (got >= 0).all()
    worst = int((got - want).abs().max()) if got.numel() else 0
    assert worst <= 1, f"key16 is off by {worst} units"
    return out, expected


@pytest.mark.parametrize("order", ["heads_inner", "keys_inner"])
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize(("padded", "group"), [(1, 1), (9, 4), (16, 5), (33, 4)])
def test_ragged_rows(device, dtype, scope, order, padded, group):
    """Full, short, empty and skipped rows, shared page-table entries, several query blocks."""
    full, some = padded, (padded + 1) // 2
    batch = make_batch(
        [70, 0, 33, 5, 200], [full, some, 0, full, full], padded, group=group, dtype=dtype, device=device,
        skip=(3,), duplicates=True, seed=padded,
    )  # fmt: skip
    check(batch, scope, order=order, block_n=32, chunk=64)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims_and_16_bit_keys(device, head_dim, dtype):
    batch = make_batch([45, 130], [3, 4], 4, head_dim=head_dim, dtype=dtype, device=device)
    check(batch, block_n=32)


def test_fp32_products_are_exact(device):
    """No TF32: the product of fp32 tensors keeps its mantissa."""
    check(make_batch([60, 31], [2, 2], 2, dtype=torch.float32, device=device), block_n=16)


def test_fp8_keys_are_scaled(device):
    batch = make_batch([150, 60], [5, 2], 5, dtype=torch.bfloat16, k_dtype=torch.float8_e4m3fn, device=device)
    check(batch, k_scale=0.5)


def test_prefix_may_end_before_the_queries(device, dtype):
    batch = make_batch([50, 20, 9], [4, 4, 2], 4, prefix=[50, 7, 0], dtype=dtype, device=device)
    check(batch, block_n=16)


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_probabilities_sum_to_the_number_of_queries(device, dtype, scope):
    """Score times the number of queries that see the key, summed over keys, is the number of queries."""
    batch = make_batch([90, 17], [9, 4], 9, group=4, dtype=dtype, device=device)
    out, _ = check(batch, scope, block_n=32)
    score = ((out.int() << 15) + (1 << 14)).view(torch.float32)  # the middle of each key's interval
    for row in range(2):
        c, real, n = (int(x[row]) for x in (batch.first, batch.queries, batch.prefix))
        seen_by = real - (torch.arange(n, device=device) - c).clamp(min=0)
        line = score[..., int(batch.offset[row]) :][..., :n]
        assert torch.allclose((line * seen_by).sum(-1), torch.tensor(float(real), device=device), rtol=4e-3)


def test_strided_queries_and_page_table(device, dtype):
    """q as a view of a fused QKV activation, the page table as a view of a wider one."""
    batch = make_batch([40, 66], [3, 3], 3, dtype=dtype, device=device)
    wide = torch.zeros(batch.q.shape[0], batch.q.shape[1] + 3, batch.q.shape[2], dtype=dtype, device=device)
    wide[:, : batch.q.shape[1]] = batch.q
    batch.q = wide[:, : batch.q.shape[1]]
    table = torch.full((2, batch.page_table.shape[1] + 11), -1, dtype=torch.int32, device=device)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    batch.page_table = table[:, : batch.page_table.shape[1]]
    check(batch, block_n=32)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(device, dtype, seed):
    rng = random.Random(seed)
    rows, longest = (rng.randint(1, 6), 150) if device.type == "cpu" else (rng.randint(1, 64), 4096)
    padded = rng.randint(1, 16)
    first = [rng.randint(0, longest) for _ in range(rows)]
    queries = [rng.choice([0, padded, padded, rng.randint(1, padded)]) for _ in range(rows)]
    if device.type == "cuda":
        first[0], queries[0] = 131_072 - padded, padded
    group = rng.choice([1, 2, 4, 7])
    skip = [r for r in range(rows) if rng.random() < 0.15]
    batch = make_batch(first, queries, padded, group=group, dtype=dtype, device=device, seed=seed, skip=skip)
    check(batch, rng.choice(["layer", "kv_head"]), order=rng.choice(["heads_inner", "keys_inner"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scope": "head"}, "scope is 'head'"),
        ({"padded_queries": 3}, "rows x padded_queries"),
        ({"order": "fast"}, "order is 'fast'"),
        ({"out": torch.zeros(9, dtype=torch.int32)}, "out is torch.int32"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    batch = make_batch([4, 4], [2, 2], 2)
    options = {"padded_queries": 2, "scale": 1.0, "out": torch.zeros(12, dtype=torch.int16)} | change
    lse = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=message):
        score_keys(
            batch.q, batch.k_cache, lse, batch.page_table, batch.first, batch.queries, batch.prefix,
            batch.offset, **options,
        )  # fmt: skip
