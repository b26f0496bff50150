"""Quantised products of drafts: SGLang's kernels against the dequantised weights, on a GPU."""

import pytest
import torch
from sglang_sparsespec import compat
from sglang_sparsespec.draft_weights import BITS, Fp8Linear, MarlinLinear, ReferenceFp8Linear, ReferenceLinear

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernel():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return compat.Marlin(torch.device("cuda"), torch.bfloat16)


SHAPES = [(6144, 4096), (4096, 4096), (4096, 12288), (64, 256), (1536, 896)]


@pytest.mark.parametrize("kind", list(BITS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 48, 96, 300])
def test_the_product_is_the_dequantised_weights(kernel, kind, shape, tokens):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.05
    x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(shape[0], dtype=torch.bfloat16, device="cuda")
    fast, slow = MarlinLinear(weight, BITS[kind], kernel), ReferenceLinear(weight.float(), BITS[kind])
    # The reference must round its scales as the kernel's are stored.
    slow._weight = ReferenceLinear(weight, BITS[kind])._weight.float()
    want = slow(x.float(), bias.float())
    torch.testing.assert_close(fast(x, bias).float(), want, atol=0.02 * want.std().item(), rtol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 48, 96, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fp8_product_is_the_rounded_weights_by_the_rounded_rows(shape, tokens, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products of 8-bit floating point")
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype, device="cuda") * 0.05
    x = torch.randn(tokens, shape[1], dtype=dtype, device="cuda")
    bias = torch.randn(shape[0], dtype=dtype, device="cuda")
    fast, slow = Fp8Linear(weight), ReferenceFp8Linear(weight.float())
    want = slow(x.float(), bias.float())
    spread = want.std().item() if tokens else 0.0
    torch.testing.assert_close(fast(x, bias).float(), want, atol=0.02 * spread, rtol=0.02)
    assert torch.equal(fast(x[None], bias)[0], fast(x, bias))


def test_new_weights_are_loaded_in_place(kernel):
    old, new = (torch.randn(256, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x = torch.randn(5, 256, dtype=torch.bfloat16, device="cuda")
    linear = MarlinLinear(old, 8, kernel)
    graph = torch.cuda.CUDAGraph()
    linear(x, None)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = linear(x, None)
    linear.load(new)
    graph.replay()
    assert torch.equal(out, MarlinLinear(new, 8, kernel)(x, None))
