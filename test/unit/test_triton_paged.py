"""Triton's paged attention as micro-steps call it, in Triton's interpreter, against the torch reference."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from sglang_sparsespec.attention.interface import LayerKV
from sglang_sparsespec.attention.paged_reference import TorchPagedAttention
from sglang_sparsespec.attention.triton_paged import TritonPagedAttention

torch.manual_seed(0)
torch.set_num_threads(1)
k, v = (torch.randn(300, 2, 64) for _ in "kv")
k[:100] = v[:100] = float("nan")
layer = LayerKV(index=0, k=k, v=v, scale=0.125, heads=8)
fast, slow = TritonPagedAttention(), TorchPagedAttention()
for lengths in ([40, 0, 7], [33]):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    rows = len(lengths)
    for heads in (1, 2):
        pages = torch.randint(100, 300, (rows, heads, 50), dtype=torch.int32)
        pages = torch.where(torch.arange(50) < lengths[:, None, None], pages, 5)
        if heads > 1:
            pages = pages * heads + torch.arange(heads)[None, :, None]
        pages = pages.to(torch.int32)
        q = torch.randn(rows, 8, 64)
        torch.testing.assert_close(fast.draft(layer, q, pages, lengths), slow.draft(layer, q, pages, lengths))
    starts = torch.arange(rows + 1, dtype=torch.int32) * 3
    pages = torch.randint(100, 300, (rows, 50), dtype=torch.int32)
    q = torch.randn(rows * 3, 8, 64)
    arguments = (layer, q, pages, lengths, starts, 3)
    torch.testing.assert_close(fast.verify(*arguments), slow.verify(*arguments))
print("equal")
"""


def test_rows_match_the_reference_in_the_interpreter():
    pytest.importorskip("triton")
    # In a process of its own: Triton reads the variable when it is imported.
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
