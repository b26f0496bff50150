"""Seeds of requests: the hash against a loop, the law of what is drawn, and that drafts change nothing."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from sglang_sparsespec.sampling.accept import accept_drafts, draft_tokens
from sglang_sparsespec.sampling.filters import SamplingRows, sampling_probs
from sglang_sparsespec.sampling.seeds import Seeds, gumbel, murmur, prefilling, sample_prefilled, seeds_of

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 12
WORD = 0xFFFFFFFF


def reference_hash(seed, position, token):
    """MurmurHash3 of 16 bytes, by its definition."""

    def rotated(x, bits):
        return ((x << bits) | (x >> (32 - bits))) & WORD

    h = 0
    for word in (seed & WORD, (seed >> 32) & WORD, position, token):
        k = rotated((word * 0xCC9E2D51) & WORD, 15) * 0x1B873593 & WORD
        h = (rotated(h ^ k, 13) * 5 + 0xE6546B64) & WORD
    h ^= 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & WORD
    return h ^ (h >> 16)


def test_the_hash_is_murmurs():
    seeds = [0, 1, 42, -1, 2**63 - 1, -(2**63), 123456789012345]
    positions, tokens = [0, 1, 17, 131_071], [0, 1, 151_935]
    found = murmur(torch.tensor(seeds)[:, None, None], torch.tensor(positions)[:, None], torch.tensor(tokens))
    want = [[[reference_hash(s, p, t) for t in tokens] for p in positions] for s in seeds]
    assert found.tolist() == want
    assert gumbel(torch.tensor(1), torch.tensor(2), torch.arange(1000)).isfinite().all()


def rows(seeds, **given):
    count = len(seeds)
    values = {"temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0} | given
    columns = {name: torch.tensor([value] * count) for name, value in values.items()}
    found = Seeds(torch.tensor([s or 0 for s in seeds]), torch.tensor([s is not None for s in seeds]))
    return SamplingRows(**columns, all_greedy=False, filters=bool(given), sequential=False, seeds=found)


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("given", [{}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 3, "min_p": 0.05}])
def test_over_seeds_and_over_positions_tokens_follow_their_law(given):
    draws = 20_000
    law = sampling_probs(logits_of(1, VOCAB), rows([1], **given)).expand(draws, -1)
    count = torch.arange(draws)
    for seeds, positions in ((count, torch.full((draws,), 7)), (torch.full((draws,), 3), count)):
        picked = Seeds(seeds, seeds >= 0).pick(law, positions)
        found = torch.bincount(picked, minlength=VOCAB).double()
        want = law[0].double() * draws
        assert found[want == 0].sum() == 0
        assert stats.chisquare(found[want > 0], want[want > 0] / want.sum() * draws).pvalue > 1e-4


def decode_plainly(logits, seeds, prompt):
    """Token by token: the one that its position's law takes with the seed's noise."""
    found = []
    for at in range(len(logits)):
        probs = sampling_probs(logits[at : at + 1], rows(seeds))
        found.append(int(rows(seeds).seeds.pick(probs, torch.tensor([prompt + at]))))
    return found


@pytest.mark.parametrize("kind", ["good", "other", "wrong"])
def test_whatever_was_drafted_the_output_is_that_of_plain_decoding(kind):
    """Logits depend on the position alone here, so a whole chain can be compared."""
    k, prompt, length = 4, 20, 60
    target = logits_of(length + k + 1, VOCAB, seed=5)
    near, far = target + 0.3 * logits_of(*target.shape, seed=6), logits_of(*target.shape, seed=7)
    draft = {"good": near, "other": far, "wrong": target}[kind]
    generator, seeds = torch.Generator().manual_seed(0), [77]
    out, rounds = [], 0
    while len(out) < length:
        at, drafts, ids, probs = len(out), [], [], []
        for i in range(k):
            made = draft_tokens(
                draft[at + i : at + i + 1],
                rows(seeds),
                support=6,
                generator=generator,
                positions=torch.tensor([prompt + at + i]),
                wrong=kind == "wrong",
            )
            drafts.append(made.tokens)
            ids.append(made.support_ids)
            probs.append(made.support_probs)
        accepted = accept_drafts(
            target[None, at : at + k + 1],
            torch.stack(drafts, 1),
            torch.tensor([k]),
            rows(seeds),
            support_ids=torch.stack(ids, 1),
            support_probs=torch.stack(probs, 1),
            generator=generator,
            positions=torch.tensor([prompt + at]),
        )
        out += accepted.tokens[0, : int(accepted.lengths)].tolist()
        rounds += 1
    assert out[:length] == decode_plainly(target[:length], seeds, prompt)
    assert rounds < (0.5 if kind == "good" else 1.01) * length


def test_requests_without_a_seed_are_drawn_as_before_beside_those_with():
    k, count = 2, 30_000
    target = logits_of(1, k + 1, VOCAB, seed=3).expand(count, -1, -1)
    seeds = [9 if i % 2 else None for i in range(count)]
    mixed = rows(seeds)
    generator = torch.Generator().manual_seed(1)
    positions = torch.full((count,), 5)
    first = draft_tokens(target[:, 0], mixed, support=4, generator=generator, positions=positions)
    second = draft_tokens(target[:, 1], mixed, support=4, generator=generator, positions=positions + 1)
    accepted = accept_drafts(
        target,
        torch.stack([first.tokens, second.tokens], 1),
        torch.full((count,), k),
        mixed,
        support_ids=torch.stack([first.support_ids, second.support_ids], 1),
        support_probs=torch.stack([first.support_probs, second.support_probs], 1),
        generator=generator,
        positions=positions,
    )
    with_seed = {
        tuple(t[:n].tolist()) for t, n in zip(accepted.tokens[1::2], accepted.lengths[1::2], strict=True)
    }
    assert len(with_seed) == 1
    found = Counter(accepted.tokens[::2, 0].tolist())
    law = torch.softmax(target[0, 0].double(), 0) * (count // 2)
    observed = [found[token] for token in range(VOCAB)]
    assert stats.chisquare(observed, (law / law.sum() * sum(observed)).tolist()).pvalue > 1e-4


def test_plain_rounds_take_the_same_tokens():
    target = logits_of(3, 1, VOCAB, seed=8)
    accepted = accept_drafts(
        target,
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        rows([4, None, 4]),
        support_ids=torch.zeros(3, 0, 2, dtype=torch.int64),
        support_probs=torch.zeros(3, 0, 2),
        generator=torch.Generator().manual_seed(0),
        positions=torch.tensor([6, 6, 6]),
    )
    want = [decode_plainly(target[row], [4], 6)[0] for row in (0, 2)]
    assert accepted.tokens[[0, 2], 0].tolist() == want


def batch_of(*seeds, greedy=False):
    params = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    info = SimpleNamespace(is_all_greedy=greedy)
    return SimpleNamespace(reqs=params, sampling_info=info, req_pool_indices=torch.arange(len(seeds)))


def test_batches_without_seeds_cost_nothing():
    assert seeds_of(batch_of(None, None)) is None
    assert seeds_of(batch_of(1, 2, greedy=True)) is None
    found = seeds_of(batch_of(0, None, -5))
    assert found.given.tolist() == [True, False, True] and found.values.tolist() == [0, 0, -5]


def test_first_tokens_of_seeded_requests_are_replaced_the_others_kept():
    probs = torch.softmax(logits_of(3, VOCAB, seed=2), -1)
    needs = dict.fromkeys(
        ("is_any_greedy", *(f"need_{kind}_sampling" for kind in ("top_k", "top_p", "min_p")))
    )
    info = SimpleNamespace(
        temperatures=torch.ones(3, 1),
        top_ks=torch.full((3,), 1 << 30),
        top_ps=torch.ones(3),
        min_ps=torch.zeros(3),
        is_all_greedy=False,
        **needs,
    )
    tokens = torch.tensor([99, 98, 97], dtype=torch.int32)
    positions = torch.tensor([4, 5, 6])
    assert sample_prefilled((tokens, None), None, probs, info, positions, True) is None
    with prefilling(seeds_of(batch_of(3, None, 3))):
        found, captured = sample_prefilled((tokens, "captured"), None, probs, info, positions, True)
    assert found.dtype == tokens.dtype and captured == "captured" and found[1] == 98
    seeds = Seeds(torch.tensor([3, 3, 3]), torch.tensor([True] * 3))
    assert found[[0, 2]].tolist() == seeds.pick(probs, positions)[[0, 2]].tolist()
    with prefilling(None):
        assert sample_prefilled((tokens, None), None, probs, info, positions, True) is None
