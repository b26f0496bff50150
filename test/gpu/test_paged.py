"""Attention of the CUDA-graph path against the plain-torch reference, on a GPU."""

import pytest
import torch
from sglang_sparsespec.attention import obstacle
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged_reference import TorchPagedAttention

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 40_000
SHAPES = [(32, 8, 128), (8, 8, 64), (16, 1, 128), (28, 4, 256)]


@pytest.fixture(params=["fa3", "triton", "fused"])
def fast(request):
    """A function that makes the attention of a shape, or skips where it cannot."""

    def make(shape):
        heads, kv_heads, dim = shape
        if reason := obstacle(request.param, DEVICE, torch.bfloat16, dim):
            pytest.skip(f"no {request.param}: {reason}")
        if request.param == "fused":
            from sglang_sparsespec.attention.fused import FusedAttention

            return FusedAttention(heads=heads, kv_heads=kv_heads, head_dim=dim, queries=9, device=DEVICE)
        if request.param == "fa3":
            from sglang_sparsespec.attention.fa3 import FA3Attention

            return FA3Attention()
        from sglang_sparsespec.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention()

    return make


def make_layer(heads: int, kv_heads: int, dim: int) -> LayerKV:
    torch.manual_seed(0)
    kv = [torch.randn(SLOTS, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for part in kv:
        part[: SLOTS // 2] = float("nan")  # unused slots: garbage in page tables points here
    return LayerKV(index=0, k=kv[0], v=kv[1], scale=dim**-0.5, heads=heads)


def make_pages(rows: int, width: int, lengths: torch.Tensor, heads: int = 1) -> torch.Tensor:
    table = torch.randint(0, SLOTS // 2, (rows, heads, width), dtype=torch.int32, device="cuda")
    good = torch.randint(SLOTS // 2, SLOTS, (rows, heads, width), dtype=torch.int32, device="cuda")
    table = torch.where(torch.arange(width, device="cuda") < lengths[:, None, None], good, table)
    if heads > 1:
        table = table * heads + torch.arange(heads, dtype=torch.int32, device="cuda")[None, :, None]
    return table


def close(got, want, real, *, loose: float = 1.0) -> None:
    torch.testing.assert_close(
        got[0][real], want[0][real].to(got[0].dtype), atol=0.02 * loose, rtol=0.02 * loose
    )
    assert got[0].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 43])
def test_draft_rows_match_the_reference(fast, rows, per_head, shape):
    attention, layer = fast(shape), make_layer(*shape)
    lengths = torch.randint(1, 420, (rows,), dtype=torch.int32, device="cuda")
    lengths[-1] = 0 if rows > 1 else 7
    pages = make_pages(rows, 450, lengths, shape[1] if per_head else 1)
    q = torch.randn(rows, shape[0], shape[2], dtype=torch.bfloat16, device="cuda")
    attention.begin_drafts(lengths)
    got = attention.draft(layer, q, pages, lengths)
    want = TorchPagedAttention().draft(layer, q, pages, lengths)
    real = lengths > 0
    close(got, want, real)
    torch.testing.assert_close(got[1][real], want[1][real].float(), atol=0.01, rtol=0.001)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("queries", [2, 9, 16])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_verify_rows_match_the_reference(fast, rows, queries, shape):
    attention, layer = fast(shape), make_layer(*shape)
    lengths = torch.randint(queries, 3000, (rows,), dtype=torch.int32, device="cuda")
    lengths[-1] = 0 if rows > 1 else 99
    pages = make_pages(rows, 3100, lengths)[:, 0]
    q = torch.randn(rows * queries, shape[0], shape[2], dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * queries
    got = attention.verify(layer, q, pages, lengths, starts, queries)
    want = TorchPagedAttention().verify(layer, q, pages, lengths, starts, queries)
    real = (lengths > 0).repeat_interleave(queries)
    close(got, want, real)
    torch.testing.assert_close(got[1][:, real], want[1][:, real].float(), atol=0.01, rtol=0.001)


def test_an_fp8_cache_is_read_with_its_scales(fast):
    attention, layer = fast((32, 8, 128)), make_layer(32, 8, 128)
    eight = {part: (getattr(layer, part) / 2).to(torch.float8_e4m3fn) for part in "kv"}
    stored = LayerKV(**{**vars(layer), **eight, "k_scale": 2.0, "v_scale": 2.0})
    read_back = LayerKV(**{**vars(layer), **{part: t.float() * 2 for part, t in eight.items()}})
    lengths = torch.tensor([500, 40, 1300], dtype=torch.int32, device="cuda")
    pages = make_pages(3, 1400, lengths)[:, 0]
    # FA3 wants queries in fp8 too: these lose nothing by it.
    q = torch.randn(27, 32, 128, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn).bfloat16()
    starts = torch.arange(4, dtype=torch.int32, device="cuda") * 9
    got = attention.verify(stored, q, pages, lengths, starts, 9)
    want = TorchPagedAttention().verify(read_back, q, pages, lengths, starts, 9)
    close(got, want, slice(None), loose=3.0)
    torch.testing.assert_close(got[1], want[1].float(), atol=0.02, rtol=0.01)
