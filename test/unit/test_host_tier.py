"""The host tier: when it is asked for, its copies on the CPU platform, and where the memory went."""

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang_sparsespec import algorithm, compat
from sglang_sparsespec.config import CONFIG_ENV, ConfigError
from sglang_sparsespec.memory.report import LITTLE, MemoryReport, size_of
from sglang_sparsespec.platforms.cpu_host_pool import back_up, load_layer

# --- when it is asked for ---


@pytest.fixture
def asked(monkeypatch):
    """Runs the step of SGLang's resolution with so much free host memory. Whether the tier was asked for."""

    def run(offload, *, free, given=None):
        from sglang.srt.server_args import ServerArgs

        monkeypatch.setenv(CONFIG_ENV, f'{{"offload": "{offload}"}}')
        monkeypatch.setattr(compat, "host_memory_gib", lambda: free)
        fields = {"speculative_algorithm": "sparsespec", **(given or {})}
        args = ServerArgs(model_path="m", **fields)
        rest = []
        algorithm.want_host_tier(args, rest.append)
        assert rest == [args]
        return any(
            fields.get("enable_hierarchical_cache")
            for _, fields in getattr(args, "_resolved_overrides", None) or []
        )

    return run


def test_the_host_tier_is_asked_for_where_it_fits(asked, caplog):
    assert asked("on", free=8) and asked("auto", free=9)
    assert not asked("off", free=99)
    with caplog.at_level(logging.WARNING):
        assert not asked("auto", free=7.5)
    assert "7.5 GiB of host memory are free for KV" in caplog.text
    with pytest.raises(ConfigError, match=r"offload is 'on', but 0\.0 GiB .*--hicache-size.*offload 'off'"):
        asked("on", free=-2.0)


def test_a_size_that_was_given_is_taken_as_it_is(asked):
    assert asked("on", free=0, given={"hicache_size": 3})
    assert asked("auto", free=0, given={"hicache_host_memory_fraction": None})  # as a given ratio leaves it


@pytest.mark.parametrize("given", [{"speculative_algorithm": None}, {"enable_hierarchical_cache": True}])
def test_others_and_who_has_a_host_tier_are_left_alone(asked, given):
    assert not asked("on", free=99, given=given)


# --- copies on the CPU platform ---


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_copies_go_to_the_host_and_back(layout):
    generator = torch.Generator().manual_seed(1)
    layers, slots, host_slots, heads, dims = 3, 10, 7, 2, 4
    keys = [torch.randn(slots, heads, dims, generator=generator) for _ in range(layers)]
    values = [torch.randn(slots, heads, dims, generator=generator) for _ in range(layers)]
    shape = (layers, host_slots) if layout == "layer_first" else (host_slots, layers)
    stores = [torch.zeros(*shape, heads, dims) for _ in range(2)]
    views = [list(s if layout == "layer_first" else s.transpose(0, 1)) for s in stores]
    pool = SimpleNamespace(
        layout=layout, layer_num=layers, device_k_buffers=keys, device_v_buffers=values,
        k_data_refs=views[0], v_data_refs=views[1],
    )  # fmt: skip
    there, here = torch.tensor([6, 0, 3]), torch.tensor([9, 2, 5])
    back_up(pool, None, there, here, "kernel")
    before = [[b[here].clone() for b in buffers] for buffers in (keys, values)]
    others = torch.tensor([1, 7, 4])
    for layer in range(layers):
        load_layer(pool, None, there, others, layer, "kernel")
        for buffers, wanted in zip((keys, values), before, strict=True):
            assert torch.equal(buffers[layer][others], wanted[layer])
            assert torch.equal(buffers[layer][here], wanted[layer])


@pytest.mark.parametrize("copy", [lambda p: back_up(p, *[None] * 4), lambda p: load_layer(p, *[None] * 5)])
def test_other_layouts_are_refused_by_name(copy):
    with pytest.raises(ValueError, match=r"--hicache-mem-layout=page_head .*layer_first, page_first"):
        copy(SimpleNamespace(layout="page_head"))


# --- the report ---


def test_memory_that_is_shared_is_counted_once():
    whole = torch.zeros(100, dtype=torch.float32)
    assert size_of([whole, whole[:10], whole.view(10, 10), torch.zeros(3, dtype=torch.float64)]) == 424


def test_the_report_names_every_part_and_the_rest():
    gib = 1 << 30
    report = MemoryReport(
        15 * gib, 4 * gib, 100 * gib, 728_000, gib // 8, gib // 4, 3 * gib, 200 * gib, 1_456_000,
        free=10 * gib, total=140 * gib,
    )  # fmt: skip
    assert report.other == 140 * gib - 10 * gib - int(122.375 * gib)
    text = str(report)
    for part in ("weights 15.00", "drafts 4.00", "KV pool 100.00 (728,000 tokens)", "graphs 3.00",
                 "other 7.62", "free 10.00 of 140.00", "host: 200.00 of KV (1,456,000 tokens)"):  # fmt: skip
        assert part in text
    assert "Little" not in text


def test_the_report_says_what_to_do_where_little_is_left_and_nothing_of_a_device_on_a_cpu():
    parts = dict.fromkeys(list(MemoryReport.__dataclass_fields__)[:9], 1)
    assert "--mem-fraction-static" in str(MemoryReport(**parts, free=LITTLE - 1, total=2 * LITTLE))
    assert "free" not in str(MemoryReport(**parts)) and MemoryReport(**parts).asdict()["other"] is None
