"""Paged attention against float64: ragged rows, garbage pages, poisoned KV slots, keys split in any way."""

import dataclasses
import random

import pytest
import torch
from sgl_kernel_ext import paged_attention as module
from sgl_kernel_ext import reference
from sgl_kernel_ext.paged_attention import choose_splits, choose_tiling, paged_attention

UNTOUCHED = 77.0
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass
class Rows:
    """Inputs of `paged_attention`; see there for shapes."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor | None
    most_queries: int


def make_rows(lengths, queries, *, kv_heads=2, group=2, head_dim=64, dtype, device, seed=0, kv_dtype=None,
              uniform=False):  # fmt: skip
    """Rows of `lengths` keys and `queries` queries; slots that no row uses are NaN."""
    g = torch.Generator().manual_seed(seed)
    slots = 2 * sum(lengths) + 8
    caches = [torch.full((slots, kv_heads, head_dim), float("nan")) for _ in "kv"]
    order = torch.randperm(slots - 1, generator=g) + 1
    table = torch.full((len(lengths), max([*lengths, 1]) + 9), 2_000_000_000, dtype=torch.int32)
    at = 0
    for row, n in enumerate(lengths):
        table[row, :n] = order[at : at + n].int()
        at += n
        for cache in caches:
            cache[table[row, :n].long()] = torch.randn(n, kv_heads, head_dim, generator=g)
    q = torch.randn(sum(queries), kv_heads * group, head_dim, generator=g) * 2
    starts = torch.tensor([sum(queries[:row]) for row in range(len(queries) + 1)], dtype=torch.int32)
    k, v = (cache.to(kv_dtype or dtype).to(device) for cache in caches)
    ints = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Rows(
        q.to(device, dtype), k, v, table.to(device), ints, None if uniform else starts.to(device),
        max(queries),
    )  # fmt: skip


def check(rows, *, k_scale=1.0, v_scale=1.0, tolerance=None, **options):
    scale = rows.q.shape[2] ** -0.5
    common = {"most_queries": rows.most_queries, "scale": scale, "k_scale": k_scale, "v_scale": v_scale}
    args = (rows.q, rows.k_cache, rows.v_cache, rows.page_table, rows.lengths, rows.starts)
    got = paged_attention(*args, **common, **options)
    want = reference.paged_attention(*args, **common)
    tolerance = tolerance or TOLERANCE[rows.q.dtype]
    torch.testing.assert_close(got[0].double(), want[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], atol=max(1e-4, tolerance / 10), rtol=1e-5)
    return got


@pytest.mark.parametrize(
    ("queries", "group", "kv_heads", "splits"),
    [(1, 1, 2, 1), (1, 2, 1, 64), (9, 4, 1, 1), (9, 4, 1, 3), (16, 7, 1, 1), (16, 7, 1, 2)],
)
def test_ragged_rows(device, dtype, queries, group, kv_heads, splits):
    """Full, short and empty rows; rows shorter than a tile; several query blocks; more splits than tiles."""
    some = (queries + 3) // 4
    rows = make_rows(
        [queries, 0, 33, 130], [queries, some, 1, some],
        kv_heads=kv_heads, group=group, dtype=dtype, device=device,
    )  # fmt: skip
    out, lse = check(rows, splits=splits, block_n=16 if queries == 1 else 32)
    begin, end = rows.starts[1:3].tolist()
    assert not out[begin:end].any() and (lse[:, begin:end] == float("-inf")).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims_and_16_bit_keys(device, head_dim, dtype):
    check(make_rows([49, 134], [4, 3], head_dim=head_dim, dtype=dtype, device=device), splits=2)


def test_fp32_products_are_exact(device):
    """No TF32: the product of fp32 tensors keeps its mantissa."""
    check(make_rows([62, 33], [2, 2], dtype=torch.float32, device=device), block_n=16)


@pytest.mark.parametrize("in_software", [False, True])
def test_fp8_keys_and_values_are_scaled(device, monkeypatch, in_software):
    if in_software:
        monkeypatch.setattr(module, "_capability", lambda device: (8, 0))
    rows = make_rows([150, 60], [5, 2], dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, device=device)
    check(rows, k_scale=0.5, v_scale=3.0, tolerance=1e-2)


def test_fp8_bytes_convert_exactly(device, monkeypatch):
    """Every finite float8, subnormal ones too: one key a row, so that the output is the value itself."""
    monkeypatch.setattr(module, "_capability", lambda device: (8, 0))
    values = torch.arange(256, dtype=torch.uint8)
    values[values % 128 == 127] = 0  # NaN
    v = values.view(torch.float8_e4m3fn).view(4, 1, 64).to(device)
    out, _ = paged_attention(
        torch.zeros(4, 1, 64, device=device), torch.zeros_like(v), v,
        torch.arange(4, dtype=torch.int32, device=device)[:, None],
        torch.ones(4, dtype=torch.int32, device=device), None, most_queries=1, scale=1.0,
    )  # fmt: skip
    assert torch.equal(out, v.float())


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_as_many_queries_need_no_starts(device, dtype, splits):
    check(make_rows([90, 0, 17], [4, 4, 4], dtype=dtype, device=device, uniform=True), splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_strided_inputs_and_given_outputs(device, dtype, splits):
    """q as a view of a fused QKV activation, a wider page table, LSE by token; tokens of no row are left."""
    rows = make_rows([40, 66], [3, 2], dtype=dtype, device=device)
    tokens, heads, dim = rows.q.shape
    wide = torch.full((tokens + 2, heads + 3, dim), float("nan"), dtype=dtype, device=device)
    wide[1 : tokens + 1, :heads] = rows.q
    table = torch.full((2, rows.page_table.shape[1] + 11), -1, dtype=torch.int32, device=device)
    table[:, : rows.page_table.shape[1]] = rows.page_table
    want = check(rows, splits=splits)
    out = torch.full((tokens + 2, heads, dim), UNTOUCHED, dtype=dtype, device=device)
    lse = torch.full((tokens + 2, heads), UNTOUCHED, device=device)
    got = paged_attention(
        wide[:, :heads], rows.k_cache, rows.v_cache, table[:, : rows.page_table.shape[1]], rows.lengths,
        rows.starts + 1, most_queries=rows.most_queries, scale=dim**-0.5, out=out, lse=lse.t(), splits=splits,
    )  # fmt: skip
    assert got[0] is out
    assert torch.equal(out[1:-1], want[0]) and torch.equal(lse[1:-1].t(), want[1])
    assert (out[[0, -1]] == UNTOUCHED).all() and (lse[[0, -1]] == UNTOUCHED).all()


@pytest.mark.parametrize("seed", range(5))
def test_random_batches(device, dtype, seed):
    rng = random.Random(seed)
    count, longest = (rng.randint(1, 6), 150) if device.type == "cpu" else (rng.randint(1, 48), 4096)
    most = rng.randint(1, 16)
    group = rng.choice([1, 2, 4, 7])
    queries = [rng.randint(1, most) for _ in range(count)]
    lengths = [rng.choice([0, n, n + rng.randint(0, longest), n + longest]) for n in queries]
    if device.type == "cuda":
        lengths[0] = 131_072
    rows = make_rows(
        lengths, queries, kv_heads=1 if group > 2 else 2, group=group, dtype=dtype, device=device, seed=seed
    )
    check(rows, splits=rng.choice([None, 1, 2]))


def test_a_batch_of_no_rows(device, dtype):
    rows = make_rows([5], [1], dtype=dtype, device=device)
    rows.q, rows.page_table, rows.lengths = rows.q[:0], rows.page_table[:0], rows.lengths[:0]
    out, lse = paged_attention(
        rows.q, rows.k_cache, rows.v_cache, rows.page_table, rows.lengths, None, most_queries=1, scale=1.0
    )
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


def test_a_graph_serves_other_lengths(device, dtype):
    """Nothing of the launch depends on the lengths."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    rows = make_rows([700, 900, 3000], [9, 9, 9], group=4, head_dim=128, dtype=dtype, device=device)
    other = torch.tensor([9, 0, 2000], dtype=torch.int32, device=device)
    args = (rows.q, rows.k_cache, rows.v_cache, rows.page_table, rows.lengths, rows.starts)
    options = {"most_queries": 9, "scale": 0.1}
    paged_attention(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_attention(*args, **options)
    rows.lengths.copy_(other)
    graph.replay()
    want = paged_attention(*args, **options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("lanes", [64, 128, 256])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tilings_fit_the_shared_memory(shared, lanes, block_m):
    for async_products in (False, True):
        tiling = choose_tiling(shared, lanes, block_m, 2, 2, async_products=async_products)
        tiles = tiling.num_stages // 2 + async_products
        assert block_m * lanes * 2 + tiles * tiling.block_n * lanes * 4 < shared
        assert tiling.num_stages >= 3 and tiling.block_n >= 16


def test_splits_fill_the_device_and_stay_within_the_width():
    assert choose_splits(384, 132, 64) == 2  # 768 programs, three waves of 264
    assert choose_splits(40, 132, 64) == 13  # 520 programs, two waves
    assert choose_splits(8, 132, 3) == 3
    assert choose_splits(5000, 132, 1) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 4, 64, dtype=torch.float64)}, "q is torch.float64"),
        ({"q": torch.zeros(4, 3, 64)}, "multiples of the KV heads"),
        ({"v_cache": torch.zeros(9, 2, 32)}, "v_cache torch.float32"),
        ({"page_table": torch.zeros(2, 8, dtype=torch.int64)}, "page_table is torch.int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths is torch.int32"),
        ({"starts": torch.zeros(3)}, "starts is torch.float32"),
        ({"starts": None, "most_queries": 3}, "q holds 4 tokens for 2 rows"),
        ({"out": torch.zeros(4, 4, 32)}, "out is torch.float32"),
        ({"lse": torch.zeros(4, 5)}, "lse is torch.float32"),
        ({"splits": 65}, "splits is 65"),
    ],
)
def test_errors_say_what_is_allowed(change, message):
    given = {
        "q": torch.zeros(4, 4, 64), "k_cache": torch.zeros(9, 2, 64), "v_cache": torch.zeros(9, 2, 64),
        "page_table": torch.zeros(2, 8, dtype=torch.int32), "lengths": torch.zeros(2, dtype=torch.int32),
        "starts": torch.tensor([0, 2, 4], dtype=torch.int32), "most_queries": 2, "scale": 1.0,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        paged_attention(**given)
