"""Quantised copies of weights, on the reference product."""

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang_sparsespec import compat
from sglang_sparsespec.config import ConfigError, SparseSpecConfig
from sglang_sparsespec.draft_weights import (
    BITS,
    GROUP,
    INT4_ROWS,
    MARLIN_ROWS,
    SAMPLE,
    TIERS,
    DraftWeights,
    DraftWeightsError,
    Quantiser,
    _sample,
    dequantise,
    quantise,
    quantise_fp8,
)


class Layer(torch.nn.Module):
    """As SGLang's linear layers: a weight, and a method that multiplies by it."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) * 0.1, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x, bias=None):
        return self.quant_method.apply(self, x, bias)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.linear.LinearBase", Layer)
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(128, 256), Layer(64, 256), Layer(40, 64))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.12)])
def test_codes_are_near_the_weights(bits, most):
    torch.manual_seed(1)
    weight = torch.randn(64, 4 * GROUP) * torch.rand(64, 1)
    codes, scales = quantise(weight, bits)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 1 << bits
    back = dequantise(codes, scales, bits)
    assert (back - weight).norm() < most * weight.norm()
    # The slow, obvious way: a group at a time, at the scale that was chosen.
    half = 1 << (bits - 1)
    for row, group in [(0, 0), (63, 3), (17, 2)]:
        part = slice(group * GROUP, (group + 1) * GROUP)
        want = (weight[row, part] / scales[row, group]).round().clamp(-half, half - 1)
        assert torch.equal(codes[row, part].float() - half, want)


def test_large_weights_are_quantised_in_parts(monkeypatch):
    torch.manual_seed(3)
    weight = torch.randn(100, 2 * GROUP)
    whole = [quantise(weight, 8), quantise(weight, 4), quantise_fp8(weight)]
    monkeypatch.setattr("sglang_sparsespec.draft_weights.PART", 7 * 2 * GROUP)
    parts = [quantise(weight, 8), quantise(weight, 4), quantise_fp8(weight)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
        assert torch.equal(one[1], other[1])


def test_groups_of_zeros_and_of_one_large_weight_survive():
    weight = torch.zeros(2, GROUP)
    weight[1, 7] = 3.0
    for bits in (4, 8):
        back = dequantise(*quantise(weight, bits), bits)
        assert torch.equal(back[0], weight[0])
        assert back[1, 7] == pytest.approx(3.0, rel=0.25)
        assert back.isfinite().all()


def test_fp8_codes_are_near_the_weights_and_keep_the_largest_of_each_output():
    torch.manual_seed(1)
    weight = torch.randn(64, 256) * torch.rand(64, 1)
    weight[3] = 0
    codes, scales = quantise_fp8(weight)
    back = codes.float() * scales[:, None]
    assert back.isfinite().all()
    # 3 bits of mantissa: half a step is 1/16 at most, and 2^-10 of the largest below the smallest exponent.
    peak = weight.abs().amax(dim=1, keepdim=True)
    assert ((back - weight).abs() <= weight.abs() / 16 + peak / 448 / 1024 + 1e-12).all()
    torch.testing.assert_close(back.abs().amax(dim=1), weight.abs().amax(dim=1))


def drafted(layer, x, bias, form):
    """The slow, obvious product of a draft."""
    weight = layer.weight.data
    if form != "fp8":
        return torch.nn.functional.linear(x, dequantise(*quantise(weight, BITS[form]), BITS[form]), bias)
    out = torch.empty(len(x), len(weight))
    for row in range(len(x)):
        scale = x[row].abs().max() / 448
        rounded = (x[row] / scale).to(torch.float8_e4m3fn).float() * scale
        for output in range(len(weight)):
            step = weight[output].abs().max() / 448
            out[row, output] = rounded @ ((weight[output] / step).to(torch.float8_e4m3fn).float() * step)
    return out + bias


@pytest.mark.parametrize("kind", list(TIERS))
def test_copies_are_in_use_inside_active_only(model, kind):
    x, bias = torch.randn(3, 256), torch.randn(128)
    own = model[0](x, bias)
    weights = DraftWeights(model, kind)
    assert len(weights) == 2  # 40 outputs are no multiple of 64
    assert torch.equal(model[0](x, bias), own)
    with weights.active(rows=3):
        found = model[0](x, bias)
    torch.testing.assert_close(found, drafted(model[0], x, bias, TIERS[kind][0].format))
    assert not torch.equal(found, own)
    with pytest.raises(ZeroDivisionError), weights.active(rows=3):
        1 / 0  # noqa: B018
    assert torch.equal(model[0](x, bias), own)


@pytest.mark.parametrize(
    ("kind", "rows", "form"),
    [
        ("int8", MARLIN_ROWS, "int8"),
        ("int8", MARLIN_ROWS + 1, None),
        ("int4", MARLIN_ROWS, "int4"),
        ("int4", MARLIN_ROWS + 1, None),
        ("fp8", 1, "fp8"),
        ("fp8", 4096, "fp8"),
        ("int4+fp8", INT4_ROWS, "int4"),
        ("int4+fp8", INT4_ROWS + 1, "fp8"),
    ],
)
def test_the_number_of_rows_decides_what_is_read(model, kind, rows, form):
    weights = DraftWeights(model, kind)
    x, bias = torch.randn(3, 256), torch.randn(128)
    own = model[0](x, bias)
    with weights.active(rows=rows):
        found = model[0](x, bias)
    want = drafted(model[0], x, bias, form) if form else own
    torch.testing.assert_close(found, want)


class Processor:
    """As SGLang's logits processor: multiplies by the weights of the output layer that it is given."""

    use_fp32_lm_head = use_fp32_lm_head_output = False
    rl_on_policy_target = None

    def _compute_lm_head(self, hidden, lm_head, embedding_bias=None, *, out=None):
        return hidden @ lm_head.weight.T


@pytest.mark.parametrize("kind", list(TIERS))
def test_the_output_layer_is_read_in_8_bits(model, kind):
    model.lm_head, model.logits_processor = Layer(192, 256), Processor()
    model.lm_head.quant_method = UnquantizedEmbeddingMethod()
    other, hidden = Layer(192, 256), torch.randn(3, 256)
    before = DraftWeights(model, kind)
    assert len(before) == 3
    compute, own = model.logits_processor._compute_lm_head, hidden @ model.lm_head.weight.T
    assert torch.equal(compute(hidden, model.lm_head, out=None), own)
    with before.active(rows=3):
        found = compute(hidden, model.lm_head)
        assert torch.equal(compute(hidden, other), hidden @ other.weight.T), "another layer's weights"
    torch.testing.assert_close(
        found, drafted(model.lm_head, hidden, torch.zeros(192), "int8" if kind == "int8" else "fp8")
    )
    model.lm_head.weight.data.neg_()
    assert before.refresh() == 1
    with before.active(rows=3):
        torch.testing.assert_close(compute(hidden, model.lm_head), -found)


@pytest.mark.parametrize("flag", ["use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target"])
def test_an_output_layer_of_another_type_keeps_its_weights(model, flag):
    model.lm_head, model.logits_processor = Layer(192, 256), Processor()
    model.lm_head.quant_method = UnquantizedEmbeddingMethod()
    setattr(model.logits_processor, flag, True)
    assert len(DraftWeights(model, "fp8")) == 2


def test_changed_weights_are_quantised_anew(model):
    weights = DraftWeights(model, "int8")
    assert weights.refresh() == 0
    model[1].weight.data.mul_(3)
    x = torch.randn(2, 256)
    assert weights.refresh() == 1
    with weights.active(rows=3):
        assert torch.allclose(model[1](x), torch.nn.functional.linear(x, model[1].weight), atol=0.1)
    assert weights.refresh() == 0


def test_a_change_of_some_columns_is_seen():
    weight = torch.zeros(16 * 1024, 512)
    before = _sample(weight)
    assert len(before) < 2 * SAMPLE
    weight[:, 1::2] = 1
    assert not torch.equal(_sample(weight), before)


def test_a_model_without_a_layer_to_quantise_is_refused(monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.linear.LinearBase", Layer)
    with pytest.raises(DraftWeightsError, match='Set it to "model"'):
        DraftWeights(torch.nn.Sequential(Layer(40, 64)), "int4")


def test_a_kernel_that_cannot_be_built_is_an_error_with_ways_out(monkeypatch):
    def fail(device, dtype):
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(compat, "Marlin", fail)
    with pytest.raises(DraftWeightsError, match=r"no nvcc.*Install them, or set draft_weights"):
        Quantiser("int8")._load_marlin(torch.zeros(64, 256))


def test_packed_codes_stand_where_the_kernel_reads_them():
    """The slow way round: every code is looked up by lane, word and bit as csrc/few_rows.cuh does."""
    from sgl_kernel_ext.few_rows import pack

    torch.manual_seed(2)
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8)
    scales = torch.randn(32, 2)
    packed, turned = pack(codes, scales)
    words = packed.view(torch.int32).view(2, 2, 2, 8, 4, 4)  # tile, block, half, output, quarter, word
    for n in range(32):
        for k in range(256):
            block, inside = divmod(k, 128)
            word = int(words[n // 16, block, n % 16 // 8, n % 8, inside // 32, inside % 32 // 8])
            j = inside % 8
            assert word >> 4 * (j // 2 + j % 2 * 4) & 15 == int(codes[n, k])
    assert torch.equal(turned, scales.T)


def test_what_few_rows_cannot_serve_is_said():
    from sgl_kernel_ext.few_rows import supported

    assert "torch.float16" in supported(torch.float16, 64, 256, "cuda")
    assert "[40, 256], needed: multiples of 32 and 128" in supported(torch.bfloat16, 40, 256, "cuda")
    assert "device is cpu" in supported(torch.bfloat16, 64, 256, "cpu")


def test_a_gpu_without_fp8_products_is_refused_by_name():
    with pytest.raises(DraftWeightsError, match=r"'int4\+fp8', but this GPU \(compute capability 8\.0\)"):
        Quantiser("int4+fp8")._check_fp8((8, 0))
    Quantiser("fp8")._check_fp8((9, 0))


def test_unified_shares_its_forwards_and_so_its_weights():
    with pytest.raises(ConfigError, match=r"draft_weights is 'int8' and schedule is 'unified'.*Use schedule"):
        SparseSpecConfig(draft_weights="int8", schedule="unified")


def test_the_kernels_that_drafts_need_are_left_of_sglangs_source():
    text = compat.marlin_source()
    calls = text.split("MarlinFuncPtr get_marlin_kernel(")[1].split("return kernel")[0]
    assert calls.count("COMMON_GET_IF(") == 2  # 4 and 8 bits
    assert "COMMON_GET_IF(host::kU4B8)" in calls
    assert "COMMON_GET_IF(host::kU8B128)" in calls
    assert not any(f"{other}_GET_IF(" in calls for other in ("FP4", "BIGGROUP", "ACT", "FZP"))
    macros = text.split("#define COMMON_GET_IF_M1")[1].split("#define COMMON_GET_IF(")[0]
    assert macros.count(" 8, NUM_THREADS, false)") == macros.count("_GET_IF(W_TYPE") == 5
