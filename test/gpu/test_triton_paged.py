"""Triton's micro-step attention against the plain-torch reference, on any GPU."""

import pytest
import torch
from sglang_sparsespec.attention import triton_obstacle
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged_reference import TorchPagedAttention

OBSTACLE = triton_obstacle("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, 128)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=f"no Triton: {OBSTACLE}")]
SLOTS = 40_000


def setup(heads: int, kv_heads: int, dim: int):
    from sglang_sparsespec.attention.triton_paged import TritonPagedAttention

    torch.manual_seed(0)
    kv = [torch.randn(SLOTS, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for part in kv:
        part[: SLOTS // 2] = float("nan")  # unused slots: garbage in page tables points here
    layer = LayerKV(index=0, k=kv[0], v=kv[1], scale=dim**-0.5, heads=heads)
    return layer, TritonPagedAttention(), TorchPagedAttention()


def pages(rows: int, width: int, lengths: torch.Tensor, heads: int = 1) -> torch.Tensor:
    table = torch.randint(0, SLOTS // 2, (rows, heads, width), dtype=torch.int32, device="cuda")
    good = torch.randint(SLOTS // 2, SLOTS, (rows, heads, width), dtype=torch.int32, device="cuda")
    table = torch.where(torch.arange(width, device="cuda") < lengths[:, None, None], good, table)
    if heads > 1:
        table = table * heads + torch.arange(heads, dtype=torch.int32, device="cuda")[None, :, None]
    return table


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (16, 1, 128), (28, 4, 256)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 43])
def test_draft_rows_match_the_reference(rows, per_head, heads):
    layer, fast, slow = setup(*heads)
    lengths = torch.randint(1, 420, (rows,), dtype=torch.int32, device="cuda")
    lengths[-1] = 0 if rows > 1 else 7
    table = pages(rows, 450, lengths, heads[1] if per_head else 1)
    q = torch.randn(rows, heads[0], heads[2], dtype=torch.bfloat16, device="cuda")
    got, want = fast.draft(layer, q, table, lengths), slow.draft(layer, q, table, lengths)
    real = lengths > 0
    torch.testing.assert_close(got[0][real], want[0][real], atol=0.02, rtol=0.02)
    torch.testing.assert_close(got[1][real], want[1][real].float(), atol=0.01, rtol=0.001)
    assert got[0].isfinite().all()


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (16, 1, 128), (28, 4, 256)], ids=str)
@pytest.mark.parametrize("queries", [2, 9, 16])
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_verify_rows_match_the_reference(rows, queries, heads):
    layer, fast, slow = setup(*heads)
    lengths = torch.randint(queries, 3000, (rows,), dtype=torch.int32, device="cuda")
    lengths[-1] = 0 if rows > 1 else 99
    table = pages(rows, 3100, lengths)[:, 0]
    q = torch.randn(rows * queries, heads[0], heads[2], dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * queries
    got = fast.verify(layer, q, table, lengths, starts, queries)
    want = slow.verify(layer, q, table, lengths, starts, queries)
    real = (lengths > 0).repeat_interleave(queries)
    torch.testing.assert_close(got[0][real], want[0][real], atol=0.02, rtol=0.02)
    torch.testing.assert_close(got[1][:, real], want[1][:, real].float(), atol=0.01, rtol=0.001)
    assert got[0].isfinite().all()


def test_an_fp8_cache_is_read_with_its_scales():
    """On every GPU: those before Ada convert fp8 in the kernel."""
    layer, fast, slow = setup(32, 8, 128)
    eight = {part: (getattr(layer, part) / 2).to(torch.float8_e4m3fn) for part in "kv"}
    stored = LayerKV(**{**vars(layer), **eight, "k_scale": 2.0, "v_scale": 2.0})
    read_back = LayerKV(**{**vars(layer), **{part: t.float() * 2 for part, t in eight.items()}})
    lengths = torch.tensor([500, 40, 1300], dtype=torch.int32, device="cuda")
    table = pages(3, 1400, lengths)
    q = torch.randn(27, 32, 128, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(4, dtype=torch.int32, device="cuda") * 9
    for got, want in (
        (fast.draft(stored, q[:3], table, lengths), slow.draft(read_back, q[:3], table, lengths)),
        (
            fast.verify(stored, q, table[:, 0], lengths, starts, 9),
            slow.verify(read_back, q, table[:, 0], lengths, starts, 9),
        ),
    ):
        torch.testing.assert_close(got[0], want[0], atol=0.02, rtol=0.02)
        torch.testing.assert_close(got[1], want[1].float(), atol=0.01, rtol=0.001)
