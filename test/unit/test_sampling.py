"""Filters, drafts and acceptance: each against an obvious loop, acceptance against the law it must keep."""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from sglang_sparsespec.sampling.accept import accept_drafts, draft_tokens
from sglang_sparsespec.sampling.filters import SamplingRows, draw, sampling_probs

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, DRAWS = 8, 40_000
TOP_K_ALL = 1 << 30

FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "together": {"temperature": 0.8, "top_k": 5, "top_p": 0.85, "min_p": 0.05},
}


def rows_of(count, sequential=False, all_greedy=False, **given):
    """Sampling parameters: numbers for all rows, or a list with one a row."""
    values = {"temperature": 1.0, "top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0} | given
    columns = {
        name: torch.tensor(value if isinstance(value, list) else [value] * count)
        for name, value in values.items()
    }
    return SamplingRows(**columns, all_greedy=all_greedy, filters=bool(given), sequential=sequential)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def logits_of(*shape, seed=0, scale=1.5):
    return torch.randn(*shape, generator=seeded(seed)) * scale


# --- filters ---


def reference_probs(logits, temperature, top_k, top_p, min_p, sequential):
    """One row, by a loop over ranks in float64."""
    probs = torch.softmax(logits.double() / temperature, dim=0).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if sequential:
        total = sum(probs[token] for token in order[:top_k])
        probs = [p / total for p in probs]
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p and probs[token] >= probs[order[0]] * min_p:
            kept[token] = probs[token]
        before += probs[token]
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(probs))]


def mixed_rows(count, sequential=False):
    chance = seeded(3)

    def pick(values):
        return [values[i] for i in torch.randint(len(values), (count,), generator=chance)]

    return rows_of(
        count,
        sequential,
        temperature=pick([0.3, 1.0, 2.0]),
        top_k=pick([1, 2, 5, TOP_K_ALL]),
        top_p=pick([0.31, 0.73, 1.0]),
        min_p=pick([0.0, 0.1, 0.5]),
    )


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 8, 300])
def test_probabilities_are_those_of_the_loop(vocabulary, sequential):
    rows, logits = mixed_rows(120, sequential), logits_of(120, vocabulary)
    probs = sampling_probs(logits, rows)
    assert probs.dtype == torch.float32
    for row in range(120):
        expected = reference_probs(
            logits[row],
            float(rows.temperature[row]),
            int(rows.top_k[row]),
            float(rows.top_p[row]),
            float(rows.min_p[row]),
            sequential,
        )
        torch.testing.assert_close(probs[row], torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [8, 300])
@pytest.mark.parametrize("min_p", [False, True])
def test_probabilities_are_those_that_sglang_draws_from(vocabulary, min_p):
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    rows, logits = mixed_rows(200), logits_of(200, vocabulary)
    if not min_p:
        rows = SamplingRows(**{**vars(rows), "min_p": torch.zeros(200)})
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / rows.temperature[:, None], dim=-1),
        rows.top_k,
        rows.top_p,
        rows.min_p,
        min_p,
        None,
        torch.zeros(200, dtype=torch.int64),
        return_filtered_probs=True,
    )
    expected = torch.zeros_like(weights).scatter(1, ids.long(), weights / weights.sum(dim=1, keepdim=True))
    torch.testing.assert_close(sampling_probs(logits, rows), expected)


def test_a_greedy_row_is_one_hot_at_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert sampling_probs(logits, rows_of(1, top_k=1)).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_are_taken_in_float32(dtype):
    logits, rows = logits_of(4, 50).to(dtype), rows_of(4, temperature=0.7)
    assert torch.equal(sampling_probs(logits, rows), sampling_probs(logits.float(), rows))


def info(**given):
    values = {
        "temperatures": torch.tensor([[0.5], [1.0]], dtype=torch.bfloat16),
        "top_ks": torch.tensor([1, 9], dtype=torch.int32),
        "top_ps": torch.tensor([1.0, 0.9]),
        "min_ps": torch.tensor([0.0, 0.0]),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
    }
    return SimpleNamespace(**(values | given))


@pytest.mark.parametrize(
    "needs", ["is_any_greedy", "need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"]
)
def test_a_batch_that_needs_any_filter_gets_them(needs):
    assert not SamplingRows.from_batch(info()).filters
    assert SamplingRows.from_batch(info(**{needs: True})).filters


def test_rows_come_from_the_batch_and_can_be_repeated():
    rows = SamplingRows.from_batch(info(is_all_greedy=True, need_min_p_sampling=True))
    assert rows.all_greedy
    assert not rows.sequential  # SGLang filters in sequence in its CUDA sampler only
    taken = rows.take(torch.tensor([1, 0, 1]))
    assert taken.temperature.tolist() == [1.0, 0.5, 1.0]
    assert taken.temperature.dtype == torch.float32
    assert (taken.top_k.tolist(), taken.all_greedy, taken.filters) == ([9, 1, 9], True, True)


# --- laws ---


def same_law(tokens, law, threshold=1e-4):
    """Chi-square of drawn cells ([n] int64) against their law ([cells], sums to 1)."""
    observed = torch.bincount(tokens, minlength=len(law)).double()
    expected = law.double() / law.double().sum() * len(tokens)
    if observed[expected == 0].sum() > 0:
        return False
    small = expected < 5
    cells = [*zip(observed[~small].tolist(), expected[~small].tolist(), strict=True)]
    if expected[small].sum() >= 1:
        cells.append((float(observed[small].sum()), float(expected[small].sum())))
    got, wanted = (torch.tensor(side) for side in zip(*cells, strict=True))
    if len(cells) == 1:
        return True
    return stats.chisquare(got, wanted * got.sum() / wanted.sum()).pvalue > threshold


def test_draw_follows_its_weights_and_never_takes_a_zero():
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 1e-3])
    assert same_law(draw(weights.expand(DRAWS, -1), seeded(0)), weights / weights.sum())
    assert not same_law(draw(weights.expand(DRAWS, -1), seeded(0)), torch.full((6,), 1 / 6))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("support", [3, VOCAB, 64])
def test_drafts_come_from_the_proposal_that_they_report(name, support):
    logits, rows = logits_of(VOCAB, seed=1).expand(DRAWS, -1), rows_of(DRAWS, **FILTERS[name])
    drafts = draft_tokens(logits, rows, support=support, generator=seeded(2))
    width = min(support, VOCAB)
    assert drafts.support_ids.shape == drafts.support_probs.shape == (DRAWS, width)
    proposal = torch.zeros(VOCAB).scatter(0, drafts.support_ids[0], drafts.support_probs[0])
    torch.testing.assert_close(drafts.support_probs.sum(dim=1), torch.ones(DRAWS))
    filtered = sampling_probs(logits[:1], rows_of(1, **FILTERS[name]))[0]
    best = filtered.topk(width)
    expected = torch.zeros(VOCAB).scatter(0, best.indices, best.values / best.values.sum())
    torch.testing.assert_close(proposal, expected)
    assert same_law(drafts.tokens, proposal)


class Chain:
    """Target and draft model as Markov chains: the logits after a token depend on that token."""

    def __init__(self, seed):
        self.target = logits_of(VOCAB + 1, VOCAB, seed=seed)  # the last row: before the first token
        self.draft = self.target + 0.3 * logits_of(VOCAB + 1, VOCAB, seed=seed + 100)

    def verify(self, k, support, drafted, given, *, seed, proposal=None):
        """Draft k tokens in each of DRAWS rows and verify the first `drafted` of them."""
        rows, generator = rows_of(DRAWS, **given), seeded(seed)
        last = torch.full((DRAWS,), VOCAB)
        tokens, ids, probs, logits = [], [], [], [self.target[last]]
        for _ in range(k):
            drafts = draft_tokens(self.draft[last], rows, support=support, generator=generator)
            last = drafts.tokens
            tokens.append(last)
            ids.append(drafts.support_ids)
            probs.append(drafts.support_probs if proposal is None else proposal(drafts.support_probs))
            logits.append(self.target[last])
        tokens, logits = torch.stack(tokens, 1), torch.stack(logits, 1)
        # What was not drafted holds anything.
        behind = torch.arange(k) >= drafted[:, None]
        tokens = torch.where(behind, torch.randint(VOCAB, tokens.shape, generator=generator), tokens)
        logits[:, 1:][behind] = float("nan")
        return accept_drafts(
            logits,
            tokens,
            drafted,
            rows,
            support_ids=torch.stack(ids, 1),
            support_probs=torch.stack(probs, 1),
            generator=generator,
        )

    def first_two(self, accepted, given, seed):
        """Cell of the first two tokens; where the round gave one, the target itself draws the second."""
        first = accepted.tokens[:, 0]
        own = draw(sampling_probs(self.target[first], rows_of(DRAWS, **given)), seeded(seed))
        return first * VOCAB + torch.where(accepted.lengths > 1, accepted.tokens[:, 1], own)

    def law_of_two(self, given):
        probs = sampling_probs(self.target, rows_of(VOCAB + 1, **given))
        return (probs[VOCAB][:, None] * probs[:VOCAB]).flatten()


def all_of(k):
    return torch.full((DRAWS,), k)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("support", [2, VOCAB])
def test_the_first_two_tokens_follow_the_target(name, k, support):
    chain, given = Chain(seed=10 + k), FILTERS[name]
    accepted = chain.verify(k, support, all_of(k), given, seed=11)
    assert same_law(chain.first_two(accepted, given, seed=12), chain.law_of_two(given))
    assert accepted.lengths.min() == 1
    assert accepted.lengths.max() == k + 1


@pytest.mark.parametrize("name", ["plain", "together"])
def test_ragged_rows_follow_the_target(name):
    chain, given = Chain(seed=5), FILTERS[name]
    drafted = torch.randint(4, (DRAWS,), generator=seeded(6))
    accepted = chain.verify(3, 4, drafted, given, seed=13)
    assert (accepted.lengths <= drafted + 1).all()
    cells, law = chain.first_two(accepted, given, seed=14), chain.law_of_two(given)
    for count in range(4):
        assert same_law(cells[drafted == count], law)


def test_a_proposal_that_is_not_the_one_drawn_from_breaks_the_law():
    """The power of the tests above: a wrong q is seen."""
    chain = Chain(seed=1)
    flat = torch.full((DRAWS, VOCAB), 1 / VOCAB)
    accepted = chain.verify(1, VOCAB, all_of(1), {}, seed=11, proposal=lambda _: flat)
    assert not same_law(chain.first_two(accepted, {}, seed=12), chain.law_of_two({}), threshold=1e-8)


@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_model_that_is_the_target_is_always_accepted(k):
    chain = Chain(seed=2)
    chain.draft = chain.target
    accepted = chain.verify(k, VOCAB, all_of(k), {}, seed=3)
    assert (accepted.lengths == k + 1).float().mean() > 0.9999  # up to rounding of the coin
    assert same_law(chain.first_two(accepted, {}, seed=4), chain.law_of_two({}))


# --- greedy ---


def greedy_reference(logits, drafts, drafted):
    """Tokens of one row: the longest prefix of the drafts that the target would have chosen, and one more."""
    out = []
    for at in range(drafted + 1):
        choice = int(logits[at].argmax())
        out.append(choice)
        if at == drafted or int(drafts[at]) != choice:
            return out
    return out


def greedy_case(rows, k, seed):
    """Drafts that are right with 70%, ragged, with NaN behind the last one."""
    generator = seeded(seed)
    logits = torch.randn(rows, k + 1, VOCAB, generator=generator)
    drafts = logits.argmax(dim=-1)[:, :k]
    wrong = torch.rand(rows, k, generator=generator) < 0.3
    drafts = torch.where(wrong, (drafts + 1) % VOCAB, drafts)
    drafted = torch.randint(k + 1, (rows,), generator=generator)
    logits[torch.arange(k + 1) > drafted[:, None]] = float("nan")
    return logits, drafts, drafted


def emitted(accepted, row):
    length = int(accepted.lengths[row])
    assert accepted.bonus[row] == accepted.tokens[row, length - 1]
    return accepted.tokens[row, :length].tolist()


@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_rows_keep_the_longest_matching_prefix(k):
    logits, drafts, drafted = greedy_case(300, k, seed=k)
    accepted = accept_drafts(
        logits,
        drafts,
        drafted,
        rows_of(300, all_greedy=True, top_k=1),
        support_ids=torch.zeros(300, k, 2, dtype=torch.int64),
        support_probs=torch.zeros(300, k, 2),
        generator=None,
    )
    for row in range(300):
        assert emitted(accepted, row) == greedy_reference(logits[row], drafts[row], int(drafted[row]))


@pytest.mark.parametrize("k", [1, 3])
def test_greedy_rows_beside_sampled_ones_are_exact(k):
    """Whatever their support holds: a batch that was all greedy while they drafted stored none."""
    logits, drafts, drafted = greedy_case(300, k, seed=20 + k)
    greedy = torch.arange(300) % 3 != 0
    rows = rows_of(300, top_k=torch.where(greedy, 1, 5).tolist())
    support = torch.rand(300, k, VOCAB, generator=seeded(4))
    accepted = accept_drafts(
        logits,
        drafts,
        drafted,
        rows,
        support_ids=torch.randint(VOCAB, (300, k, VOCAB), generator=seeded(5)),
        support_probs=support / support.sum(dim=-1, keepdim=True),
        generator=seeded(6),
    )
    for row in torch.nonzero(greedy).flatten().tolist():
        assert emitted(accepted, row) == greedy_reference(logits[row], drafts[row], int(drafted[row]))


def test_greedy_drafts_keep_no_proposal():
    logits = logits_of(20, VOCAB)
    drafts = draft_tokens(logits, rows_of(20, all_greedy=True, top_k=1), support=4, generator=None)
    assert torch.equal(drafts.tokens, logits.argmax(dim=-1))
    assert drafts.support_ids is None
    assert drafts.support_probs is None


@pytest.mark.parametrize("all_greedy", [False, True])
def test_wrong_drafts_are_the_least_likely_token(all_greedy):
    logits = logits_of(200, VOCAB, seed=9)
    rows = rows_of(200, all_greedy=all_greedy, temperature=0.5, top_p=0.9)
    drafts = draft_tokens(logits, rows, support=4, generator=seeded(0), wrong=True)
    assert torch.equal(drafts.tokens, logits.argmin(dim=-1))
    assert (drafts.tokens != logits.argmax(dim=-1)).all()
    if not all_greedy:
        assert (drafts.support_probs[drafts.support_ids == drafts.tokens[:, None]] == 1.0).all()
