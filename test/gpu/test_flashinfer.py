"""FlashInfer's micro-step attention against the plain-torch reference, on a GPU."""

import pytest
import torch
from sglang_sparsespec.attention.interface import DraftRows, LayerKV, VerifyRows
from sglang_sparsespec.attention.torch_reference import TorchAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOTS, POOLS, CONTEXT = 40_000, 9, 4096


def _setup(heads: int, kv_heads: int, dim: int):
    from sglang_sparsespec.attention.flashinfer import FlashInferAttention

    torch.manual_seed(0)
    kv = [torch.randn(SLOTS, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    table = torch.randperm(SLOTS - 1, device="cuda")[: POOLS * CONTEXT].view(POOLS, CONTEXT).int() + 1
    layer = LayerKV(index=0, k=kv[0], v=kv[1], scale=dim**-0.5, heads=heads)
    fast = FlashInferAttention(table, heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16)
    return layer, fast, TorchAttention(table), table


@pytest.mark.parametrize("index_heads", ["shared", "per_head"])
@pytest.mark.parametrize("slack", [0, 300], ids=["exact", "loose"])
@pytest.mark.parametrize("rows", [1, 2, 7, 43])
def test_draft_rows_match_the_reference_whether_the_host_knows_lengths_or_bounds(rows, slack, index_heads):
    layer, fast, slow, _ = _setup(32, 8, 128)
    lengths = torch.randint(1, 420, (rows,), device="cuda")
    bounds = tuple(int(n) + slack for n in lengths.tolist())
    width = max(bounds)
    h = 1 if index_heads == "shared" else 8
    slots = torch.randint(1, SLOTS, (rows, h, width), device="cuda")
    drafts = DraftRows(
        pools=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        lengths=lengths,
        width=width,
        bounds=bounds,
        exact=slack == 0,
    )
    q = torch.randn(rows, 32, 128, dtype=torch.bfloat16, device="cuda")
    results = []
    for attention in (fast, slow):
        attention.plan(drafts, None)
        results.append(attention.draft(layer, q, slots).float())
    torch.testing.assert_close(results[0], results[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("queries", [2, 9])
def test_verify_rows_and_scores_match_the_reference(rows, queries):
    layer, fast, slow, _ = _setup(32, 8, 128)
    first = torch.randint(1, CONTEXT - queries, (rows,), device="cuda")
    real = torch.randint(1, queries + 1, (rows,), device="cuda")
    plan = VerifyRows(
        pools=torch.arange(rows, device="cuda"),
        first=first,
        queries=real,
        first_cpu=tuple(first.tolist()),
        padded_queries=queries,
    )
    q = torch.randn(rows, queries, 32, 128, dtype=torch.bfloat16, device="cuda")
    outs, scores = [], []
    for attention in (fast, slow):
        attention.plan(None, plan)
        out, score = attention.verify(layer, q, scores=True)
        outs.append(out.float())
        scores.append(score)
    for row, n in enumerate(real.tolist()):
        torch.testing.assert_close(outs[0][row, :n], outs[1][row, :n], atol=2e-2, rtol=2e-2)
        prefix = int(first[row])
        torch.testing.assert_close(
            scores[0][row, :, :prefix], scores[1][row, :, :prefix], atol=1e-4, rtol=1e-2
        )


def test_one_plan_serves_layers_with_different_selections():
    layer, fast, slow, _ = _setup(32, 8, 128)
    lengths = torch.tensor([5, 260, 31], device="cuda")
    drafts = DraftRows(
        pools=torch.zeros(3, dtype=torch.int64, device="cuda"),
        lengths=lengths,
        width=300,
        bounds=(300,) * 3,
        exact=False,
    )
    q = torch.randn(3, 32, 128, dtype=torch.bfloat16, device="cuda")
    fast.plan(drafts, None)
    slow.plan(drafts, None)
    for _ in range(3):
        slots = torch.randint(1, SLOTS, (3, 1, 300), device="cuda")
        torch.testing.assert_close(
            fast.draft(layer, q, slots).float(), slow.draft(layer, q, slots).float(), atol=2e-2, rtol=2e-2
        )
