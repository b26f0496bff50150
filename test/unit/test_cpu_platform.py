"""The CPU platform: when it activates, the defaults it sets, its attention, its versions of Triton ops."""

import inspect
import os
import pkgutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_sparsespec import platforms
from sglang_sparsespec.platforms import cpu, cpu_attention, cpu_ops

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(platforms, "_accelerator_present", lambda: False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    return monkeypatch


# --- activation ---


def test_activates_where_no_accelerator_is(no_accelerator):
    name = platforms.activate()
    assert name is not None
    assert pkgutil.resolve_name(name) is cpu.CpuTorchPlatform


@pytest.mark.parametrize("count", [0, 1])
def test_a_cuda_device_keeps_it_out(no_accelerator, count):
    no_accelerator.undo()
    no_accelerator.delenv("SGLANG_PLATFORM", raising=False)
    for name in ("xpu", "mps"):
        no_accelerator.setattr(getattr(torch, name), "is_available", lambda: False)
    no_accelerator.setattr(torch.cuda, "device_count", lambda: count)
    assert (platforms.activate() is None) == (count > 0)


def test_any_other_accelerator_keeps_it_out(no_accelerator):
    no_accelerator.undo()
    no_accelerator.delenv("SGLANG_PLATFORM", raising=False)
    no_accelerator.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert platforms.activate() is None


def test_being_asked_for_wins_over_an_accelerator(no_accelerator):
    no_accelerator.setattr(platforms, "_accelerator_present", lambda: True)
    no_accelerator.setenv("SGLANG_PLATFORM", "sparsespec_cpu")
    assert platforms.activate() is not None


@pytest.mark.parametrize(("name", "value"), [("SGLANG_PLATFORM", "other"), ("SGLANG_USE_CPU_ENGINE", "1")])
def test_stays_out_of_the_way_of_another_choice(no_accelerator, name, value):
    no_accelerator.setenv(name, value)
    assert platforms.activate() is None


def test_contradicting_choices_are_refused(no_accelerator):
    no_accelerator.setenv("SGLANG_PLATFORM", "sparsespec_cpu")
    no_accelerator.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(ValueError, match="unset one of them"):
        platforms.activate()


def test_importing_the_entry_point_imports_no_torch():
    code = "import sys, sglang_sparsespec.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- server arguments ---


def server_args(raw=None, **fields):
    values = {
        "device": "cpu",
        "attention_backend": "intel_amx",  # what SGLang itself fills in on x86
        "max_total_tokens": None,
        "max_running_requests": None,
        "sleep_on_idle": False,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
    }
    return SimpleNamespace(_raw_input=raw or {}, **(values | fields))


@pytest.fixture
def clean_env(monkeypatch):
    monkeypatch.setattr(cpu, "_env_defaults", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)
    for name in ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)


def test_defaults_fill_what_is_open(clean_env):
    args = server_args()
    cpu.CpuTorchPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "torch_native"
    assert args.max_total_tokens == 65536
    assert args.max_running_requests == 32
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ


def test_values_of_the_user_stay(clean_env, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    args = server_args(max_total_tokens=7, max_running_requests=5)
    cpu.CpuTorchPlatform().apply_server_args_defaults(args)
    assert (args.max_total_tokens, args.max_running_requests) == (7, 5)
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_each_engine_gets_thread_teams_for_its_ranks(clean_env):
    platform = cpu.CpuTorchPlatform()
    platform.apply_server_args_defaults(server_args(tp_size=2))
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    platform.apply_server_args_defaults(server_args(tp_size=4, pp_size=2))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2|3|4|0|1|2"


@pytest.mark.parametrize(
    "name", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
@pytest.mark.parametrize("backend", ["intel_amx", "triton"])
def test_another_attention_backend_is_refused(clean_env, name, backend):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}={backend}.*allowed is torch_native"):
        cpu.CpuTorchPlatform().apply_server_args_defaults(server_args({name: backend}))


def test_another_device_is_refused(clean_env):
    with pytest.raises(ValueError, match="the device is 'cuda'"):
        cpu.CpuTorchPlatform().apply_server_args_defaults(server_args(device="cuda"))


# --- attention ---


def cache(slots=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, slots, KV_HEADS, DIM, generator=generator)
    return k, v


def page_table(kv_lens, slots=512):
    table = torch.zeros(len(kv_lens), max(kv_lens) + 3, dtype=torch.int32)
    free = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(1)) + 1
    for i, n in enumerate(kv_lens):
        table[i, :n] = free[sum(kv_lens[:i]) :][:n]
        table[i, n:] = slots - 1  # stale
    return table


def reference(q, k_cache, v_cache, table, q_lens, kv_lens, window=None, causal=True, sinks=None):
    """One query and one head at a time, in float64."""
    outputs, row = [], 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        slots = table[i, :kv_len].long()
        for pos in range(kv_len - q_len, kv_len):
            first = 0 if window is None else max(0, pos - window)
            seen = slots[first : pos + 1] if causal else slots
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = k_cache[seen, kv_head].double() @ q[row, head].double() * 0.3
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                outputs.append(scores.softmax(0)[: len(seen)] @ v_cache[seen, kv_head].double())
            row += 1
    return torch.cat(outputs).view(row, -1).float()


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "padded"),
    [
        ([1], [9], True),
        ([1, 1, 1], [9, 9, 9], True),
        ([1, 1, 1], [9, 5, 1], True),
        ([3, 3], [3, 20], True),
        ([1, 1, 1, 1], [90, 2, 3, 4], False),  # padding would cost too much
        ([7, 4, 1, 0], [7, 20, 6, 5], False),  # prefill, chunk, decode row, nothing
    ],
)
@pytest.mark.parametrize(("window", "causal"), [(None, True), (4, True), (100, True), (None, False)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])], ids=["plain", "sinks"])
def test_attention_is_that_of_the_loop(q_lens, kv_lens, padded, window, causal, sinks):
    k, v = cache()
    k[-1] = v[-1] = float("nan")  # nothing stale may be read
    table = page_table(kv_lens)
    q = torch.randn(sum(q_lens), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    metadata = cpu_attention.build_metadata(table, q_lens, kv_lens)
    assert metadata.padded == padded
    out = cpu_attention.paged_attention(
        q, k, v, metadata, scale=0.3, window=window, causal=causal, sinks=sinks
    )
    expected = reference(q, k, v, table, q_lens, kv_lens, window, causal, sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch():
    kv_lens = [40, 33, 25, 37]
    k, v = cache()
    table = page_table(kv_lens)
    q = torch.randn(4, HEADS, DIM)
    together = cpu_attention.paged_attention(
        q, k, v, cpu_attention.build_metadata(table, [1] * 4, kv_lens), scale=0.3
    )
    for i, kv_len in enumerate(kv_lens):
        alone = cpu_attention.build_metadata(table[i : i + 1], [1], [kv_len])
        out = cpu_attention.paged_attention(q[i : i + 1], k, v, alone, scale=0.3)
        torch.testing.assert_close(out[0], together[i], atol=1e-6, rtol=1e-6)


def test_more_queries_than_keys_is_refused():
    with pytest.raises(ValueError, match="3 queries but 2 keys"):
        cpu_attention.build_metadata(torch.zeros(1, 4, dtype=torch.int32), [3], [2])


def backend(pool=None):
    made = cpu_attention.CpuTorchAttnBackend.__new__(cpu_attention.CpuTorchAttnBackend)
    made.req_to_token_pool = SimpleNamespace(req_to_token=page_table([9, 5, 7]))
    made.token_to_kv_pool = pool
    return made


@pytest.mark.parametrize(
    ("mode", "q_lens"), [("DECODE", [1, 1]), ("EXTEND", [2, 4]), ("MIXED", [4, 1]), ("IDLE", None)]
)
def test_backend_reads_the_forward_batch(mode, q_lens):
    made = backend()
    batch = SimpleNamespace(
        forward_mode=ForwardMode[mode],
        seq_lens=torch.tensor([7, 9]),
        extend_seq_lens=torch.tensor(q_lens) if q_lens else None,
        req_pool_indices=torch.tensor([2, 0]),
    )
    made.init_forward_metadata(batch)
    if mode == "IDLE":
        assert made.forward_metadata is None
        return
    assert made.forward_metadata.q_lens == q_lens
    assert made.forward_metadata.kv_lens == [7, 9]
    expected = made.req_to_token_pool.req_to_token[2, :7].long()
    torch.testing.assert_close(made.forward_metadata.kv_slots[0, :7], expected)


def test_backend_refuses_speculative_modes():
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, seq_lens=torch.tensor([3]))
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        backend().init_forward_metadata(batch)


def test_backend_refuses_a_pool_it_cannot_read():
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=object())
    with pytest.raises(ValueError, match="MHATokenToKVPool"):
        cpu_attention.CpuTorchAttnBackend(runner)


# --- replacements of Triton ops ---


def test_replacements_have_the_signature_of_what_they_replace():
    for target, replacement in cpu_ops.cpu_op_replacements().items():
        original = pkgutil.resolve_name(target)
        assert list(inspect.signature(replacement).parameters) == list(inspect.signature(original).parameters)


def test_too_few_slots_are_refused():
    one = torch.tensor([0])
    with pytest.raises(ValueError, match="holds 2 slots but 3"):
        cpu_ops.assign_req_to_token_pool(one, torch.zeros(1, 4), one, one + 3, torch.arange(2), 1)


@pytest.fixture
def interpreted(monkeypatch):
    """SGLang's Triton kernels under Triton's interpreter, as TRITON_INTERPRET=1 at import has them."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.kernels.ops.speculative import gather_spec_extras as extras
    from sglang.srt.mem_cache import allocation
    from triton import language as tl
    from triton.runtime.interpreter import InterpretedFunction

    for helper in ("cdiv", "sum"):  # themselves @triton.jit
        monkeypatch.setattr(tl, helper, getattr(tl, helper).fn)
    for module, kernel in (
        (allocation, "assign_req_to_token_pool"),
        (cache_locs, "assign_extend_cache_locs"),
        (extras, "_gather_rows_kernel"),
    ):
        monkeypatch.setattr(module, kernel, InterpretedFunction(getattr(module, kernel).fn))
    return SimpleNamespace(allocation=allocation, cache_locs=cache_locs, extras=extras)


SIZES = [(1, 1), (3, 40), (5, 9)]  # requests, columns


def spans(bs, span):
    generator = torch.Generator().manual_seed(bs)
    rows = torch.randperm(8, generator=generator)[:bs]
    start = torch.randint(0, 50, (bs,), generator=generator, dtype=torch.int32)
    width = torch.randint(0, span + 1, (bs,), generator=generator, dtype=torch.int32)
    return rows, start, width


@pytest.mark.parametrize(("bs", "span"), SIZES)
def test_assign_req_to_token_pool_is_the_kernel(interpreted, bs, span):
    rows, start, width = spans(bs, span)
    slots = torch.arange(int(width.sum())) + 1
    expected, got = torch.zeros(2, 8, 100, dtype=torch.int32)
    interpreted.allocation.assign_req_to_token_pool_func(rows, expected, start, start + width, slots, bs)
    cpu_ops.assign_req_to_token_pool(rows, got, start, start + width, slots, bs)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("bs", "span"), SIZES)
def test_assign_extend_cache_locs_is_the_kernel(interpreted, bs, span):
    rows, start, _ = spans(bs, span)
    table = torch.arange(800, dtype=torch.int32).view(8, 100)
    expected = torch.zeros(bs * span, dtype=torch.int64)
    upper = 1 << (bs - 1).bit_length()
    interpreted.cache_locs.assign_extend_cache_locs[(bs,)](
        rows, table, start, start + span, expected, 100, upper
    )
    got = cpu_ops.assign_extend_cache_locs(
        req_pool_indices=rows,
        req_to_token=table,
        start_offset=start,
        end_offset=start + span,
        batch_size=bs,
        draft_token_num=span,
        device="cpu",
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("with_hidden", [False, True])
@pytest.mark.parametrize("bs", [0, 1, 5])
def test_gather_spec_extras_is_the_kernel(interpreted, bs, with_hidden):
    rows = torch.randperm(8)[:bs]
    hidden = torch.randn(8, 2, 5) if with_hidden else None
    buffers = (torch.randn(8, 3), torch.arange(24).view(8, 3), torch.arange(8), hidden)
    expected = interpreted.extras.gather_spec_extras(rows, *buffers)
    for got, want in zip(cpu_ops.gather_spec_extras(rows, *buffers), expected, strict=True):
        assert got is want is None or torch.equal(got, want)


# --- what the server takes from the platform ---


def test_kv_pool_launches_no_triton():
    pool_cls = cpu.CpuTorchPlatform().get_kv_pool_cls(kind="mha")
    pool = pool_cls.__new__(pool_cls)
    pool._init_kv_copy_and_warmup()
    assert pool.use_native_move_kv_cache
    assert cpu.CpuTorchPlatform().get_kv_pool_cls(kind="mla") is None


def test_missing_thread_binding_is_skipped_on_arm64(monkeypatch):
    from sglang.srt.distributed import bootstrap

    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", True)
    cpu._skip_missing_thread_binding()
    assert bootstrap._is_cpu_arm64 == hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env")
