"""The verification kernel: in the CPU emulator where there is a C++ compiler, through Python on Hopper."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from sgl_kernel_ext import cuda  # noqa: E402

needs_hopper = pytest.mark.skipif(
    cuda.supported(128, 4, 9, torch.bfloat16, "cuda") is not None,
    reason=str(cuda.supported(128, 4, 9, torch.bfloat16, "cuda")),
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("source", ["emulate.cpp", "emulate_few_rows.cpp"])
def test_emulated(tmp_path, source):
    binary = tmp_path / "emulate"
    compile_line = ["g++", "-std=c++17", "-O2", "-w", "-DSPARSESPEC_EMULATED", "-pthread"]
    subprocess.run([*compile_line, "-o", str(binary), str(HERE / source)], check=True)
    result = subprocess.run([str(binary)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_unsupported():
    assert "head_dim is 96" in cuda.supported(96, 4, 9, torch.bfloat16, "cuda")
    assert "torch.float16" in cuda.supported(128, 4, 9, torch.float16, "cuda")
    assert "device is cpu" in cuda.supported(128, 4, 9, torch.bfloat16, "cpu")


class Batch:
    """A random ragged batch on the GPU: 4 KV heads of 4 query heads, head dimension 128, 5 queries a row."""

    Q, HKV, G, D, SHIFT = 5, 4, 4, 128, 18

    def __init__(self, lengths, queries, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        options = {"device": "cuda", "generator": generator}
        rows, width = len(lengths), 1024
        pool = torch.randn(2, rows * width + 1, self.HKV, self.D, **options)
        self.k, self.v = pool.to(torch.bfloat16).unbind(0)
        self.q = torch.randn(rows * self.Q, self.HKV * self.G, self.D, **options).to(torch.bfloat16)
        slots = torch.randperm(rows * width, **options).to(torch.int32) + 1
        self.pages = slots.view(rows, width).repeat(1, 2)[
            :, : width + 7
        ]  # a row stride that is not the width
        self.first = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.queries = torch.tensor(queries, dtype=torch.int32, device="cuda")
        self.offset = torch.arange(rows, device="cuda") * width
        self.offset[1] = -1
        self.prefix = self.first + self.queries
        self.capacity = rows * width

    def reference(self):
        """(out, lse, probabilities summed over the queries [Hkv, capacity]) in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device="cuda")
        lse = torch.full((self.HKV * self.G, len(self.q)), -torch.inf, dtype=torch.float64, device="cuda")
        score = torch.zeros(self.HKV, self.capacity, dtype=torch.float64, device="cuda")
        for r, (first, real) in enumerate(zip(self.first.tolist(), self.queries.tolist(), strict=True)):
            slots = self.pages[r, : first + real].long()
            k, v = (x[slots].double().repeat_interleave(self.G, 1).transpose(0, 1) for x in (self.k, self.v))
            for t in range(real):
                token, seen = r * self.Q + t, first + t + 1
                logits = (k[:, :seen] @ self.q[token].double()[:, :, None])[..., 0] * self.D**-0.5
                lse[:, token] = logits.logsumexp(1)
                p = logits.softmax(1)
                out[token] = (p[:, None] @ v[:, :seen])[:, 0]
                if self.offset[r] >= 0:
                    at = int(self.offset[r])
                    score[:, at : at + seen] += p.view(self.HKV, self.G, seen).sum(1)
        return out, lse, score

    def tensors(self):
        return (self.q, self.k, self.v, self.pages, self.first, self.queries)

    def check(self, out, lse, score, ref):
        want_out, want_lse, want_score = ref
        torch.testing.assert_close(out.double(), want_out, atol=6e-3, rtol=8e-3)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
        want_score = want_score if score.dim() == 2 else want_score.sum(0)
        torch.testing.assert_close(score.double() / 2**self.SHIFT, want_score, atol=5e-5, rtol=2e-4)


def _estimates(batch, lse):
    rows = len(batch.first)
    return lse.float().t().reshape(rows, batch.Q, -1).contiguous()


@needs_hopper
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_attention_and_scores(scope):
    batch = Batch([0, 300, 1000, 63, 7], [5, 4, 5, 0, 1])
    ref = batch.reference()
    shape = (batch.capacity,) if scope == "layer" else (batch.HKV, batch.capacity)
    score = torch.zeros(shape, dtype=torch.int32, device="cuda")
    scores = {"ref_lse": _estimates(batch, ref[1]), "offset": batch.offset, "prefix": batch.prefix}
    options = {"padded_queries": batch.Q, "scale": batch.D**-0.5, "score": score, "shift": batch.SHIFT}
    out, lse = cuda.verify_attention(*batch.tensors(), **options, **scores, scope=scope)
    batch.check(out, lse, score, ref)


@needs_hopper
def test_graph_replay_with_other_lengths():
    batch = Batch([900, 10, 500], [5, 5, 2])
    size = cuda.workspace_size(batch.D, batch.G, batch.Q, torch.device("cuda"))
    score = torch.zeros(batch.capacity, dtype=torch.int32, device="cuda")
    estimates = _estimates(batch, batch.reference()[1])
    options = {
        "padded_queries": batch.Q,
        "scale": batch.D**-0.5,
        "workspace": torch.empty(size, dtype=torch.uint8, device="cuda"),
        "out": torch.empty_like(batch.q),
        "lse": torch.empty(batch.HKV * batch.G, len(batch.q), device="cuda"),
        "ref_lse": estimates,
        "offset": batch.offset,
        "prefix": batch.prefix,
        "score": score,
        "shift": batch.SHIFT,
    }
    cuda.verify_attention(*batch.tensors(), **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuda.verify_attention(*batch.tensors(), **options)
    for first, queries in (([3, 700, 0], [1, 5, 0]), ([1000, 1, 64], [5, 5, 5])):
        batch.first.copy_(torch.tensor(first))
        batch.queries.copy_(torch.tensor(queries))
        batch.prefix.copy_(batch.first + batch.queries)
        ref = batch.reference()
        estimates.copy_(_estimates(batch, ref[1]))
        score.zero_()
        graph.replay()
        batch.check(out, lse, score, ref)


@needs_hopper
@pytest.mark.parametrize("equal_ranges", [False, True])
def test_queries_may_be_a_slice_of_a_fused_projection(equal_ranges):
    batch = Batch([410, 300, 64], [5, 1, 5])
    fused = torch.full((len(batch.q), batch.HKV * (batch.G + 2) * batch.D), torch.nan, device="cuda")
    fused = fused.to(torch.bfloat16)
    slice_of_q = fused[:, : batch.q[0].numel()].view(batch.q.shape)
    slice_of_q.copy_(batch.q)
    options = {"padded_queries": batch.Q, "scale": batch.D**-0.5, "equal_ranges": equal_ranges}
    want = cuda.verify_attention(*batch.tensors(), **options)
    batch.q = slice_of_q
    got = cuda.verify_attention(*batch.tensors(), **options)
    assert got[0].is_contiguous()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_queries_must_be_aligned():
    fused = torch.zeros(6, 6 * 128, dtype=torch.bfloat16)
    cuda._check_queries(fused[:, :512].view(6, 4, 128), 6)
    for other in (fused[:, 1:513].view(6, 4, 128), fused[:1, :512].expand(6, 512).view(6, 4, 128)):
        with pytest.raises(ValueError, match=r"copy it with .contiguous\(\)"):
            cuda._check_queries(other, 6)


@needs_hopper
def test_errors_name_what_is_allowed():
    batch = Batch([10, 10], [5, 5])
    score = torch.zeros(batch.capacity, dtype=torch.int32, device="cuda")
    small = torch.empty(16, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="needs ref_lse"):
        cuda.verify_attention(*batch.tensors(), padded_queries=batch.Q, scale=1.0, score=score)
    with pytest.raises(RuntimeError, match="workspace has 16 bytes"):
        cuda.verify_attention(*batch.tensors(), padded_queries=batch.Q, scale=1.0, workspace=small)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
