"""The inputs that SGLang carries for us: rows stay aligned through any filtering and merging."""

import random
from types import SimpleNamespace

import pytest
import torch
from sglang_sparsespec.spec_input import SparseDraftInput, SparseVerifyInput


def draft_input(requests, waiting=False):
    """Every value tells its request. `waiting`: the forward that makes the values is still under way."""
    ids = torch.tensor(requests, dtype=torch.int64)
    made = SparseDraftInput(bonus_tokens=ids * 10, new_seq_lens=ids * 100)
    if waiting:
        made.future_indices = ids * 1000
    return made


def requests_of(carried, waiting):
    if waiting:
        return (carried.future_indices // 1000).tolist()
    by_token, by_length = (carried.bonus_tokens // 10).tolist(), (carried.new_seq_lens // 100).tolist()
    assert by_token == by_length
    assert carried.future_indices is None
    return by_token


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_rows_stay_aligned_through_any_sequence(seed, waiting):
    chance, fresh = random.Random(seed), iter(range(1, 10_000))
    requests = [next(fresh) for _ in range(4)]
    carried = draft_input(requests, waiting)
    for _ in range(60):
        if chance.random() < 0.5 and requests:
            kept = chance.sample(range(len(requests)), chance.randint(0, len(requests)))
            carried.filter_batch(torch.tensor(kept, dtype=torch.int64), kept)
            requests = [requests[at] for at in kept]
        else:
            more = [next(fresh) for _ in range(chance.randint(0, 4))]
            carried.merge_batch(draft_input(more, waiting))
            requests += more
        assert requests_of(carried, waiting) == requests


def test_a_waiting_batch_does_not_merge_with_one_that_is_not():
    with pytest.raises(RuntimeError, match="waits for its forward"):
        draft_input([1], waiting=True).merge_batch(draft_input([2]))


def test_a_draft_input_is_no_verify_input_and_asks_for_one_token():
    carried = draft_input([1, 2])
    assert not carried.is_verify_input()
    assert (carried.num_tokens_per_req, carried.num_tokens_for_logprob_per_req) == (1, 1)
    assert carried.topk_p is carried.topk_index is carried.hidden_states is None


def test_a_verify_input_carries_the_micro_step():
    step, positions = SimpleNamespace(), torch.tensor([4, 5])
    carried = SparseVerifyInput(positions=positions, micro_step=step, draft_token_num=9)
    assert carried.is_verify_input()
    assert carried.positions is positions and carried.micro_step is step
    assert (carried.num_tokens_per_req, carried.num_tokens_for_logprob_per_req) == (9, 9)
