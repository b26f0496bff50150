"""Plain-torch attention against a float64 loop over rows, queries and heads; slots of draft rows; routing."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang_sparsespec.attention import make_attention, obstacle, torch_reference
from sglang_sparsespec.attention.backend import SparseSpecAttentionBackend
from sglang_sparsespec.attention.interface import DraftRows, LayerKV, VerifyRows
from sglang_sparsespec.attention.layers import AttentionLayers, WindowRows, add_sinks
from sglang_sparsespec.attention.torch_reference import TorchAttention
from sglang_sparsespec.config import ConfigError, SparseSpecConfig
from sglang_sparsespec.metrics import PhaseTimer
from sglang_sparsespec.rounds.state import RequestState
from sglang_sparsespec.selection import make_selector

pytestmark = pytest.mark.usefixtures("one_thread")

STRIDE, CONTEXT, SLOTS = 4, 48, 480
HEADS = [(4, 4), (6, 2), (6, 1)]  # MHA, GQA, MQA
SIZES = [1, 2, 7]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Pool:
    """A KV pool whose unwritten slots hold NaN (all but slot 0) and a page table that points at them."""

    def __init__(self, lengths, heads, kv_heads, dim, seed=0, *, sinks=False):
        generator = seeded(seed)
        self.sinks = torch.randn(heads, generator=seeded(9)) if sinks else None
        self.heads, self.kv_heads, self.scale = heads, kv_heads, 0.3
        self.generator = generator
        order = torch.randperm(SLOTS - 1, generator=generator) + 1
        self.table = order[: (len(lengths) + 2) * CONTEXT].view(-1, CONTEXT).to(torch.int32)
        self.pools = torch.randperm(len(lengths) + 1, generator=generator)[: len(lengths)] + 1
        self.k = torch.full((SLOTS, kv_heads, dim), float("nan"))
        self.v = self.k.clone()
        self.k[0], self.v[0] = 0.0, 0.0
        for pool, length in zip(self.pools.tolist(), lengths, strict=True):
            written = self.table[pool, :length].long()
            self.k[written] = torch.randn(length, kv_heads, dim, generator=generator)
            self.v[written] = torch.randn(length, kv_heads, dim, generator=generator)

    @property
    def layer(self):
        return LayerKV(index=0, k=self.k, v=self.v, scale=self.scale, heads=self.heads, sinks=self.sinks)

    def queries(self, *shape):
        return torch.randn(*shape, self.heads, self.k.shape[2], generator=self.generator)

    def one(self, q, slots, head):
        """One query [D] and head over `slots`: output and probabilities in float64."""
        kv_head = head // (self.heads // self.kv_heads)
        logits = self.k[slots, kv_head].double() @ q.double() * self.scale
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks[head : head + 1].double()])
        probs = logits.softmax(0)[: len(slots)]
        return probs @ self.v[slots, kv_head].double(), probs


def verify_case(size, heads, dim, seed=0, *, sinks=False):
    generator = seeded(seed)
    first = torch.randint(CONTEXT - STRIDE - 2, (size,), generator=generator)
    first[0] = 0  # a context of one token
    queries = torch.randint(1, STRIDE + 2, (size,), generator=generator)
    pool = Pool((first + queries).tolist(), *heads, dim, seed, sinks=sinks)
    rows = VerifyRows(pool.pools, first, queries, tuple(first.tolist()), STRIDE + 1)
    q = pool.queries(size, STRIDE + 1)
    for row, count in enumerate(queries.tolist()):
        q[row, count:] = q[row, count - 1]  # padded queries repeat the last real one
    return pool, rows, q


def reference_verify(pool, rows, q):
    """Outputs of the real queries, and mean probabilities over the queries and heads that see a key."""
    out = torch.zeros_like(q, dtype=torch.float64)
    scores = torch.zeros(len(rows), pool.kv_heads, rows.width, dtype=torch.float64)
    group = pool.heads // pool.kv_heads
    for row, (first, count) in enumerate(zip(rows.first_cpu, rows.queries.tolist(), strict=True)):
        seen_by = torch.zeros(rows.width)
        for t in range(count):
            length = first + t + 1
            slots = pool.table[rows.pools[row], :length].long()
            seen_by[:length] += 1
            for head in range(pool.heads):
                out[row, t, head], probs = pool.one(q[row, t, head], slots, head)
                scores[row, head // group, :length] += probs
        scores[row] /= seen_by.clamp(min=1) * group
    return out.float(), scores.float()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_verification_is_that_of_the_loop(size, heads, dim, sinks):
    pool, rows, q = verify_case(size, heads, dim, sinks=sinks)
    attention = TorchAttention(pool.table)
    attention.plan(None, rows)
    out, scores = attention.verify(pool.layer, q, scores=True)
    expected, expected_scores = reference_verify(pool, rows, q)
    for row, count in enumerate(rows.queries.tolist()):
        torch.testing.assert_close(out[row, :count], expected[row, :count], rtol=1e-4, atol=1e-5)
    assert scores.shape == (size, heads[1], rows.width)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(attention.tail_scores(pool.layer, q, rows), scores)


@pytest.mark.parametrize("window", [0, 3, 1000])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_are_those_of_the_loop(window, sinks):
    lengths = [1, 9, 40]
    pool = Pool(lengths, 4, 2, 64, sinks=sinks)
    owner, positions = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 2, 8, 39, 12])
    rows = WindowRows.of(pool.table, pool.pools[owner], positions, window, dtype=torch.int64)
    q = pool.queries(len(owner))
    out = TorchAttention(pool.table).attend_window(pool.layer, q, rows.slots, rows.lengths)
    for token, (row, position) in enumerate(zip(owner.tolist(), positions.tolist(), strict=True)):
        seen = pool.table[pool.pools[row], max(0, position - window) : position + 1].long()
        assert int(rows.lengths[token]) == len(seen)
        for head in range(4):
            expected, _ = pool.one(q[token, head], seen, head)
            torch.testing.assert_close(out[token, head], expected.float(), rtol=1e-4, atol=1e-5)


def test_sinks_may_be_added_to_attention_without_them():
    with_sinks = Pool([30], 4, 2, 64, sinks=True)
    without = Pool([30], 4, 2, 64)
    q, slots = with_sinks.queries(1), without.table[without.pools[0], :30].long()
    plain = [without.one(q[0, head], slots, head)[0] for head in range(4)]
    lse = [
        (without.k[slots, head // 2].double() @ q[0, head].double() * 0.3).logsumexp(0) for head in range(4)
    ]
    out, total = add_sinks(torch.stack(plain)[None], torch.stack(lse)[None], with_sinks.sinks)
    for head in range(4):
        expected, probs = with_sinks.one(q[0, head], slots, head)
        torch.testing.assert_close(out[0, head], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.exp(lse[head] - total[0, head]), probs.sum(), rtol=1e-5, atol=1e-6)
    assert add_sinks(out, total, None)[0] is out


def test_layers_with_windows_are_told_from_the_others():
    sizes = {2: 127, 3: -1, 4: 127, 5: None, 6: 511}
    layers = AttentionLayers.of(SimpleNamespace(layer_id=i, sliding_window_size=n) for i, n in sizes.items())
    assert layers == AttentionLayers((3, 5), {2: 127, 4: 127, 6: 511})
    assert layers.sizes == (127, 511)
    assert [layers.index(i) for i in sizes] == [-1, 0, -1, 1, -1]


def test_scores_are_made_only_where_they_are_asked_for():
    pool, rows, q = verify_case(2, (4, 2), 64)
    attention = TorchAttention(pool.table)
    attention.plan(None, rows)
    out, scores = attention.verify(pool.layer, q, scores=False)
    assert scores is None
    assert out.shape == q.shape


@pytest.mark.parametrize("elements", [1, 20_000])
def test_tail_scores_do_not_depend_on_how_rows_are_grouped(monkeypatch, elements):
    pool, rows, q = verify_case(7, (6, 2), 64, seed=3)
    attention = TorchAttention(pool.table)
    whole = attention.tail_scores(pool.layer, q, rows)
    monkeypatch.setattr(torch_reference, "GATHER_ELEMENTS", elements)
    torch.testing.assert_close(attention.tail_scores(pool.layer, q, rows), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_of_the_queries(dtype):
    pool, rows, q = verify_case(2, (4, 2), 64)
    pool.k, pool.v = pool.k.to(dtype), pool.v.to(dtype)
    attention = TorchAttention(pool.table)
    attention.plan(None, rows)
    out, scores = attention.verify(pool.layer, q.to(dtype), scores=True)
    assert out.dtype == dtype
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_drafts_attend_to_their_slots_only(size, heads, dim, per_head):
    generator = seeded(size)
    lengths = torch.randint(1, 20, (size,), generator=generator)
    pool = Pool([CONTEXT] * size, *heads, dim, seed=size)
    index_heads = heads[1] if per_head else 1
    slots = torch.zeros(size, index_heads, 21, dtype=torch.int64)
    for row in range(size):
        for head in range(index_heads):
            chosen = torch.randperm(CONTEXT, generator=generator)[:21]
            slots[row, head] = pool.table[pool.pools[row], chosen].long()
    rows = DraftRows(pool.pools, lengths, 21, (21,) * size, exact=False)
    attention, q = TorchAttention(pool.table), pool.queries(size)
    attention.plan(rows, None)
    out = attention.draft(pool.layer, q, slots)
    for row in range(size):
        for head in range(heads[0]):
            index_head = head // (heads[0] // heads[1]) if per_head else 0
            attended = slots[row, index_head, : lengths[row]]
            expected, _ = pool.one(q[row, head], attended, head)
            torch.testing.assert_close(out[row, head], expected.float(), rtol=1e-4, atol=1e-5)


def test_rows_that_were_not_planned_are_refused():
    attention = TorchAttention(torch.zeros(2, 2, dtype=torch.int32))
    pool, _, q = verify_case(1, (4, 2), 64)
    with pytest.raises(RuntimeError, match="did not plan"):
        attention.draft(pool.layer, q[:, 0], torch.zeros(1, 1, 1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="did not plan"):
        attention.verify(pool.layer, q, scores=True)


# --- which implementation ---


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("cpu", torch.bfloat16, 64), "needs a CUDA device, this is 'cpu'"),
        (("cuda:0", torch.float32, 64), "bfloat16 or float16, the KV cache is torch.float32"),
        (("cuda:0", torch.float16, 80), "head dimension of (64, 128, 256), this model has 80"),
    ],
)
def test_what_flashinfer_cannot_serve_is_told(given, told):
    assert told in obstacle("flashinfer", *given)


def test_flashinfer_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "flashinfer cannot be imported" in obstacle("flashinfer", "cuda:0", torch.float16, 64)


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_torch_serves_where_flashinfer_cannot(asked):
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=SimpleNamespace(dtype=torch.float32, head_dim=64))
    made = make_attention(SparseSpecConfig(attention=asked), runner, torch.zeros(1, 1))
    assert type(made) is TorchAttention
    with pytest.raises(ConfigError, match=r'attention is "flashinfer", but it needs a CUDA device.*"auto"'):
        make_attention(SparseSpecConfig(attention="flashinfer"), runner, torch.zeros(1, 1))


# --- the backend that SGLang's model sees ---


class Inner:
    """SGLang's own backend: answers every question with the question."""

    def __getattr__(self, name):
        return f"inner {name}"


def backend_of(config=None, state=None, table=None, inner=None, kv_pool=None):
    config = config or SparseSpecConfig(stride=STRIDE)
    return SparseSpecAttentionBackend(
        inner=inner or Inner(),
        attention=TorchAttention(table),
        selector=make_selector(config),
        state=state,
        config=config,
        req_to_token=table,
        kv_pool=kv_pool,
        timer=PhaseTimer("cpu"),
        layers=AttentionLayers((0,)),
    )


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_draft_slots_are_the_selection_and_all_tokens_since(heads, seed):
    generator, capacity, layers, size = seeded(seed), 6, 2, 5
    table = torch.randperm(9 * CONTEXT, generator=generator).view(9, CONTEXT).to(torch.int32)
    state = RequestState(
        rows=9, stride=STRIDE, support=1, layers=layers, heads=heads, max_selected=capacity, device="cpu"
    )
    pools = torch.randperm(8, generator=generator)[:size] + 1
    base = torch.randint(1, 30, (size,), generator=generator)
    prefix = base + torch.randint(2 * STRIDE + 1, (size,), generator=generator)  # the draft's own position
    chosen = torch.minimum(torch.randint(1, capacity + 1, (size,), generator=generator), base)
    state.selected.fill_(CONTEXT + 7)  # beyond the page table: must not be read
    state.selected_base[pools], state.selected_len[pools] = base, chosen
    expected, lengths = {}, (chosen + prefix - base + 1).tolist()
    width = max(lengths) + 2
    for layer in range(layers):
        for row, pool in enumerate(pools.tolist()):
            for head in range(heads):
                picked = torch.randperm(int(base[row]), generator=generator)[: chosen[row]].sort().values
                state.selected[layer, head, pool, : len(picked)] = picked.int()
                positions = picked.tolist() + list(range(int(base[row]), int(prefix[row]) + 1))
                positions += [int(prefix[row])] * (width - len(positions))
                expected[layer, row, head] = table[pool, positions].tolist()
    rows = DraftRows(pools, torch.tensor(lengths), width, tuple(lengths), exact=True)
    step = SimpleNamespace(drafts=rows, row_prefix=torch.cat([prefix, torch.tensor([3])]))
    backend = backend_of(state=state, table=table)
    for layer in range(layers):
        slots = backend.draft_slots(layer, step)
        assert slots.dtype == torch.int64
        assert slots.shape == (size, heads, width)
        for row in range(size):
            for head in range(heads):
                assert slots[row, head].tolist() == expected[layer, row, head]


def test_draft_slots_need_draft_rows():
    with pytest.raises(RuntimeError, match="no draft rows"):
        backend_of().draft_slots(0, SimpleNamespace(drafts=None))


# What the wrapper answers itself, all else is for the backend inside.
OWN = {"attn_backend_list", "forward", "forward_decode", "forward_extend", "init_forward_metadata"}
OWN |= {"needs_cpu_seq_lens", "support_triton"}
PUBLIC = sorted(name for name in dir(AttentionBackend) if not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in OWN])
def test_the_backend_inside_answers_before_the_base_class(name):
    assert getattr(backend_of(), name) == f"inner {name}"


def test_what_the_wrapper_answers_itself():
    inner = SimpleNamespace(support_triton=lambda: "asked")
    backend = backend_of(inner=inner)
    assert set(PUBLIC) >= OWN
    assert backend.attn_backend_list == [inner]
    assert backend.needs_cpu_seq_lens is True
    assert backend.support_triton() == "asked"


def test_a_value_set_on_the_wrapper_wins():
    backend = backend_of()
    backend.forward_metadata = 5
    assert backend.forward_metadata == 5
    assert backend.data_type == "inner data_type"
    assert backend.anything_else == "inner anything_else"


def test_a_method_of_the_base_class_cannot_be_replaced_on_the_wrapper():
    for name in set(PUBLIC) - OWN:
        if not inspect.isfunction(vars(AttentionBackend)[name]):
            continue
        with pytest.raises(AttributeError):
            setattr(backend_of(), name, None)


# --- selections that the backend makes ---


class KVPool:
    start_layer = 0

    def __init__(self, pool):
        self.pool = pool

    def get_key_buffer(self, layer_id):
        return self.pool.k

    def get_value_buffer(self, layer_id):
        return self.pool.v


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("selector", ["pillar", "window"])
def test_a_prefill_seeds_a_selection_from_its_last_queries(scope, selector):
    extended, totals, kv_heads = [3, 30, 18], [10, 30, 41], 2
    pool = Pool(totals, 4, kv_heads, 64, seed=1)
    config = SparseSpecConfig(stride=STRIDE, selector=selector, index_scope=scope, min_tokens=6, sink=2)
    heads = 1 if scope == "layer" else kv_heads
    state = RequestState(
        rows=6, stride=STRIDE, support=1, layers=1, heads=heads, max_selected=8, device="cpu"
    )
    inner = SimpleNamespace(
        init_forward_metadata=lambda batch: None, forward=lambda q, k, v, layer, batch, save, **kwargs: q
    )
    backend = backend_of(config, state, pool.table, inner, KVPool(pool))
    backend.init_forward_metadata(
        SimpleNamespace(
            spec_info=None,
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
            extend_seq_lens_cpu=extended,
            seq_lens_cpu=torch.tensor(totals),
            req_pool_indices=pool.pools,
        )
    )
    layer = SimpleNamespace(layer_id=0, scaling=pool.scale, tp_q_head_num=4, qk_head_dim=64)
    q = pool.queries(sum(extended))
    assert backend.forward_extend(q.flatten(1), None, None, layer, None) is not None
    for row, total in enumerate(totals):
        tail = min(extended[row], 16)
        end = sum(extended[: row + 1])
        first = total - tail
        one = VerifyRows(pool.pools[[row]], torch.tensor([first]), torch.tensor([tail]), (first,), tail)
        _, scores = reference_verify(pool, one, q[end - tail : end][None])
        if scope == "layer":
            scores = scores.mean(dim=1, keepdim=True)
        if selector == "window":
            scores = None
        chosen, count = make_selector(config).select(scores, torch.tensor([total]), width=total, capacity=8)
        kept = int(count[0])
        assert int(state.selected_len[pool.pools[row]]) == kept
        assert int(state.selected_base[pool.pools[row]]) == total
        expected = chosen[0, :, :kept].expand(heads, kept)
        assert torch.equal(state.selected[0, :, pool.pools[row], :kept], expected)
