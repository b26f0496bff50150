"""Penalties, minimum lengths and bias at every position of a round, against the slow, obvious way."""

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_sparsespec import hooks
from sglang_sparsespec.sampling.adjust import (
    OutputCounts,
    counts_tokens,
    needs_adjusting,
    needs_the_host,
    stop_ids,
)

VOCABULARY, K = 23, 4
PARAMS = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 9, "stop_token_ids": [5]},
    {"logit_bias": {"3": 2.0, "8": -100.0}},
    {
        "frequency_penalty": -0.3,
        "presence_penalty": 0.6,
        "repetition_penalty": 0.8,
        "min_new_tokens": 7,
        "logit_bias": {"1": 1.5},
    },
]


def request(params, before=()):
    sampling = SamplingParams(**params)
    return SimpleNamespace(
        sampling_params=sampling,
        output_ids=list(before),
        eos_token_ids={2},
        tokenizer=None,
        custom_logit_processor=None,
    )


def batch_of(reqs):
    bias = torch.zeros(len(reqs), VOCABULARY)
    for row, req in enumerate(reqs):
        for token, value in (req.sampling_params.logit_bias or {}).items():
            bias[row, int(token)] = value
    some = any(req.sampling_params.logit_bias for req in reqs)
    return SimpleNamespace(
        reqs=reqs, has_grammar=False, sampling_info=SimpleNamespace(logit_bias=bias if some else None)
    )


def slowly(logits, req, out):
    """One position's logits [V] of a request that has put out the tokens `out`."""
    params, found = req.sampling_params, logits.clone()
    for token in range(VOCABULARY):
        count = out.count(token)
        found[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token in stop_ids(req) and len(out) < params.min_new_tokens:
            found[token] = -torch.inf
        if count:
            scale = params.repetition_penalty
            found[token] = found[token] * scale if found[token] < 0 else found[token] / scale
        found[token] += (params.logit_bias or {}).get(str(token), 0.0)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_position_counts_what_came_before_it(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts = OutputCounts(VOCABULARY, "cpu")
    before = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 3]))] for _ in PARAMS]
    reqs = [request(params, out) for params, out in zip(PARAMS, before, strict=True)]
    pools = rng.sample(range(1, 50), len(reqs))
    first = torch.randint(0, VOCABULARY, (len(reqs),))
    counts.begin(reqs, pools, first)
    outs = [[*out, int(token)] for out, token in zip(before, first, strict=True)]
    for _ in range(5):
        order = rng.sample(range(len(reqs)), len(reqs))
        adjust = counts.adjustment(batch_of([reqs[i] for i in order]), [pools[i] for i in order])
        rows = torch.tensor(rng.sample(range(len(order)), 5))  # places in the batch
        drafts, drafted = torch.randint(0, VOCABULARY, (5, K)), torch.randint(0, K + 1, (5,))
        logits = torch.randn(5, VOCABULARY) * 3
        found = adjust.of_drafts(logits, rows, drafts, drafted)
        for n, row in enumerate(rows.tolist()):
            out = outs[order[row]] + drafts[n, : drafted[n]].tolist()
            torch.testing.assert_close(found[n], slowly(logits[n], reqs[order[row]], out))
        logits = torch.randn(5, K + 1, VOCABULARY) * 3
        found = adjust.of_verifications(logits, rows, drafts)
        for n, row in enumerate(rows.tolist()):
            for position in range(K + 1):
                out = outs[order[row]] + drafts[n, :position].tolist()
                torch.testing.assert_close(
                    found[n, position], slowly(logits[n, position], reqs[order[row]], out)
                )
        tokens, lengths = torch.randint(0, VOCABULARY, (5, K + 1)), torch.randint(1, K + 2, (5,))
        adjust.accepted(rows, tokens, lengths)
        for n, row in enumerate(rows.tolist()):
            outs[order[row]] += tokens[n, : lengths[n]].tolist()


def test_a_line_that_is_used_again_starts_from_nothing():
    counts = OutputCounts(VOCABULARY, "cpu")
    for token in (4, 9):
        counts.begin([request({"frequency_penalty": 1.0})], [7], torch.tensor([token]))
        assert counts.lines[0].nonzero().flatten().tolist() == [token]


def test_many_requests_keep_their_counts_while_the_table_grows():
    counts = OutputCounts(VOCABULARY, "cpu")
    for pool in range(1, 20):
        counts.begin([request({"presence_penalty": 1.0})], [pool], torch.tensor([pool]))
    at = counts.index(list(range(1, 20)), [True] * 19)
    assert counts.lines[at].argmax(dim=1).tolist() == list(range(1, 20))


def test_requests_that_ask_for_nothing_cost_nothing():
    counts = OutputCounts(VOCABULARY, "cpu")
    plain = [request({}), request({"temperature": 0.5, "top_p": 0.9})]
    counts.begin(plain, [1, 2], torch.tensor([3, 4]))
    assert counts.adjustment(batch_of(plain), [1, 2]) is None
    assert len(counts.lines) == 0
    assert not needs_adjusting(SamplingParams(repetition_penalty=1.0, logit_bias={}))
    assert needs_adjusting(SamplingParams(logit_bias={"3": 1.0}))
    assert not counts_tokens(SamplingParams(logit_bias={"3": 1.0}))


def test_a_minimum_length_forbids_every_token_that_ends_the_request():
    req = request({"stop_token_ids": [5]})
    req.tokenizer = SimpleNamespace(eos_token_id=6, additional_stop_token_ids={7})
    assert stop_ids(req) == {2, 5, 6, 7}
    req.tokenizer = SimpleNamespace(eos_token_id=None)
    assert stop_ids(req) == {2, 5}


class Grammar:
    """As SGLang's grammar objects: the next token must be one above the last one, up to four of them."""

    def __init__(self, last):
        self.taken = [last]

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, mask, row):
        mask[row] = 0
        mask[row, 0] = 1 << (self.taken[-1] + 1)

    def accept_token(self, token):
        assert token == self.taken[-1] + 1, "what the mask forbids is not followed"
        self.taken.append(token)

    def rollback(self, count):
        del self.taken[-count:]

    def is_terminated(self):
        return len(self.taken) > 4

    def apply_vocab_mask(self, logits, vocab_mask):
        for row, bits in enumerate(vocab_mask[:, 0].tolist()):
            for token in range(logits.shape[1]):
                if not bits >> token & 1:
                    logits[row, token] = -torch.inf


def test_grammars_forbid_at_each_position_what_they_forbid_after_its_drafts():
    reqs = [request({}), request({"logit_bias": {"9": 3.0}}), request({})]
    for req, grammar in zip(reqs, (Grammar(4), None, Grammar(10)), strict=True):
        req.grammar = grammar
    batch = batch_of(reqs)
    batch.has_grammar = True
    adjust = OutputCounts(VOCABULARY, "cpu").adjustment(batch, [1, 2, 3])
    drafts = torch.tensor([[11, 12, 3, 13], [1, 2, 3, 4], [5, 6, 7, 8]])
    logits = torch.randn(3, K + 1, VOCABULARY)
    found = adjust.of_verifications(logits, torch.tensor([2, 1, 0]), drafts)  # rows of another order
    allowed = [[token for token in range(VOCABULARY) if row[token] > -torch.inf] for row in found[0]]
    # The third draft is wrong, so nothing after it matters.
    assert allowed[:3] == [[11], [12], [13]]
    assert torch.equal(found[1], logits[1] + batch.sampling_info.logit_bias[1])
    assert [int(row.argmax()) for row in found[2][:4]] == [5, 6, 7, 8]
    assert reqs[0].grammar.taken == [4] and reqs[2].grammar.taken == [10], "they go back"


class Avoids(CustomLogitProcessor):
    """Puts out no token of the last `window` twice, nor after a request's name's length."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list, strict=True):
            req = params["__req__"]
            row[list(req.output_ids[-params["window"] :])] = -torch.inf
            row[len(req.rid)] += 100.0
        return logits


def test_logit_processors_are_shown_the_drafts_before_each_position():
    torch.manual_seed(5)
    reqs = [request({"logit_bias": {"3": 4.0}}, [1, 2, 3]), request({}, [7]), request({}, [9, 9])]
    for at, req in enumerate(reqs):
        req.rid = "x" * at
        if at != 1:
            req.custom_logit_processor = Avoids.to_str()
            req.sampling_params.custom_params = {"window": at + 1, "__req__": req}
    counts = OutputCounts(VOCABULARY, "cpu")
    adjust = counts.adjustment(batch_of(reqs), [4, 5, 6])
    rows, drafts = torch.tensor([2, 1, 0]), torch.randint(0, VOCABULARY, (3, K))
    logits = torch.randn(3, K + 1, VOCABULARY)
    found = adjust.of_verifications(logits, rows, drafts)
    for n, row in enumerate(rows.tolist()):
        for position in range(K + 1):
            req = reqs[row]
            want = slowly(logits[n, position], req, [])
            if req.custom_logit_processor:
                out = [*req.output_ids, *drafts[n, :position].tolist()]
                want[out[-(row + 1) :]] = -torch.inf
                want[row] += 100.0
            torch.testing.assert_close(found[n, position], want)
    assert [req.output_ids for req in reqs] == [[1, 2, 3], [7], [9, 9]], "the requests' own are untouched"


def test_a_batch_with_a_logit_processor_waits_for_the_host():
    reqs = [request({}), request({})]
    batch = SimpleNamespace(
        reqs=reqs, has_grammar=False, forward_mode=SimpleNamespace(is_decode=lambda: True)
    )
    scheduler = SimpleNamespace(result_queue=[1])
    assert hooks._wait_for_the_host(True, scheduler, batch, None)
    assert not hooks._wait_for_the_host(False, scheduler, batch, None) and not needs_the_host(batch)
    reqs[1].custom_logit_processor = "{}"
    assert hooks._wait_for_the_host(False, scheduler, batch, None) and needs_the_host(batch)
    assert not hooks._wait_for_the_host(False, SimpleNamespace(result_queue=[]), batch, None)
    assert not hooks._wait_for_the_host(False, scheduler, None, None)
