"""Quantised products of drafts: SGLang's kernels against the dequantised weights, on a GPU."""

import pytest
import torch
from sglang_sparsespec import compat
from sglang_sparsespec.draft_weights import (
    BITS,
    INT4_ROWS,
    FewRowsLinear,
    Fp8Linear,
    MarlinLinear,
    ReferenceFp8Linear,
    ReferenceLinear,
)

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
@pytest.mark.parametrize("tokens", [0, 1, 7, 33, 48, 96, 300])
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
    from sgl_kernel_ext.row_quant import quantise_rows

    fast, slow = Fp8Linear(weight), ReferenceFp8Linear(weight.float())._weight.double()
    # The rows as the kernel rounds them: at a tie between two codes the reference may take the other one.
    codes, scales = quantise_rows(x)
    rounded = codes.double() * scales
    want = rounded @ slow.T + bias.double()
    bound = 1e-3 * (rounded.abs() @ slow.T.abs())
    assert ((fast(x, bias).double() - want).abs() <= bound + want.abs() / 100).all()
    assert torch.equal(fast(x[None], bias)[0], fast(x, bias))


def hopper():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from sgl_kernel_ext.few_rows import supported

    if reason := supported(torch.bfloat16, 64, 256, "cuda"):
        pytest.skip(reason)


@pytest.mark.parametrize("shape", [*SHAPES, (24576, 4096), (96, 128), (1024, 1152)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, INT4_ROWS])
def test_the_product_of_few_rows_is_the_dequantised_weights(shape, tokens):
    hopper()
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.05
    x = torch.randn(tokens, shape[1] + 8, dtype=torch.bfloat16, device="cuda")[:, :-8]
    bias = torch.randn(shape[0], dtype=torch.bfloat16, device="cuda")
    fast, slow = FewRowsLinear(weight), ReferenceLinear(weight, 4)._weight.double()
    want = x.double() @ slow.T
    bound = 0.002 * (x.double().abs() @ slow.T.abs())
    from sgl_kernel_ext.few_rows import VARIANTS, multiply

    for variant in range(VARIANTS):
        for with_bias in (None, bias):
            found = multiply(x, fast._codes, fast._scales, with_bias, variants=(variant, variant))
            right = want if with_bias is None else want + bias.double()
            assert ((found.double() - right).abs() <= bound + right.abs() / 200).all()
    tuned = multiply(x, fast._codes, fast._scales, bias, variants=fast._variants)
    assert torch.equal(fast(x.contiguous()[None], bias)[0], tuned)


def test_bad_operands_of_few_rows_are_named():
    hopper()
    from sgl_kernel_ext.few_rows import multiply

    fast = FewRowsLinear(torch.randn(64, 256, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(17, 256, dtype=torch.bfloat16, device="cuda")
    for bad, text in [
        (x, r"\[17, 256\]; needed: \[1 to 16, 256\]"),
        (x[:3, :128], r"\[3, 128\]"),
        (x[:3].float(), "torch.float32"),
        (x[:3].t().contiguous().t(), "strides"),
    ]:
        with pytest.raises(ValueError, match=text):
            multiply(bad, fast._codes, fast._scales)
    with pytest.raises(ValueError, match="use pack"):
        multiply(x[:3], fast._codes[:-1], fast._scales)
    with pytest.raises(ValueError, match="bias is"):
        multiply(x[:3], fast._codes, fast._scales, x[0])


@pytest.mark.parametrize("make", [FewRowsLinear, Fp8Linear])
def test_a_graph_of_products_reads_what_the_kernel_before_it_wrote(make):
    """Programmatic launches overlap: 24 products in a row, each of the one before."""
    hopper()
    torch.manual_seed(1)
    layers = [make(torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda") / 32) for _ in range(24)]
    x = torch.randn(5, 1024, dtype=torch.bfloat16, device="cuda")

    def run():
        y = x
        for layer in layers:
            y = layer(y, None)
            y = y * torch.rsqrt(y.float().square().mean(dim=-1, keepdim=True)).to(y.dtype)
        return y

    want = []
    for scale in (1.0, -2.0, 0.5):
        x.mul_(scale)
        y = x
        for layer in layers:
            y = layer(y, None)
            torch.cuda.synchronize()
            y = y * torch.rsqrt(y.float().square().mean(dim=-1, keepdim=True)).to(y.dtype)
        want.append((x.clone(), y))
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run()
    for given, right in want * 20:
        x.copy_(given)
        graph.replay()
        assert torch.equal(out, right)


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
