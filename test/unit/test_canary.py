"""What SGLang's KV canary is told of micro-steps, checked by the canary's own reference kernels.

The canary keeps each KV slot's token, position and a hash of all tokens before it, and compares what a
forward is about to read with what forwards have written.
"""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.kv_canary import consts, plan_ref, verify_ref, write_ref
from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag, VerifyOrWriteContext, VerifyPlan
from sglang.kernels.ops.kv_canary.write import WritePlan
from sglang_sparsespec import compat
from sglang_sparsespec.attention.paged_reference import TorchPagedAttention
from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.worker import _written
from toy_rounds import SLOTS, Toy

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def ints(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


class Canary:
    """SGLang's canary over a page table, without its streams and launches."""

    def __init__(self, table):
        self.table, self.found = table, ints(1, dtype=torch.int32)
        self.context = VerifyOrWriteContext(
            canary_buf=ints(table.numel() + 1, 32, dtype=torch.uint8),
            kernel_kind=CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=ints(64, consts.VIOLATION_FIELDS),
            violation_write_index=self.found,
            slot_run_counter=ints(1),
            kernel_run_counter=ints(1),
            real_kv_sources=(),
            real_kv_hash_mode=consts.RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        )

    def step(self, rows):
        """Check what the rows read, then note what they write."""
        capacity = self.table.numel() * 3
        verify = VerifyPlan.allocate(verify_capacity=capacity, device=CPU)
        write = WritePlan.allocate(write_req_capacity=len(rows.req_pool_indices), device=CPU)
        plan_ref.launch_canary_plan_kernels_torch_reference(
            verify_plan_out=verify,
            write_plan_out=write,
            req_pool_indices=rows.req_pool_indices,
            prefix_lens=rows.extend_prefix_lens,
            extend_seq_lens=rows.extend_seq_lens,
            req_to_token=self.table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=capacity,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )
        verify_ref.launch_canary_verify_kernel_torch_reference(
            context=self.context, plan=verify, check_verify_expected_token=False
        )
        write_ref.launch_canary_write_kernel_torch_reference(
            context=self.context,
            plan=write,
            input_ids=rows.input_ids,
            positions=rows.positions,
            out_cache_loc=rows.out_cache_loc,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def prefill(self, pool, length):
        at = torch.arange(length)
        self.step(
            compat.written_rows(
                pools=torch.tensor([pool]),
                prefix=ints(1),
                lengths=torch.tensor([length]),
                input_ids=at,
                positions=at,
                out_cache_loc=self.table[pool, :length].long(),
            )
        )


class Watched(Toy):
    def forward(self, step):
        self.canary.step(_written(step.buffers))
        return super().forward(step)


@pytest.fixture(params=["lockstep", "unified", "filled"])
def toy(request):
    changes = {"lockstep": {}, "unified": {"schedule": "unified"}, "filled": {"adapt": "on", "lookup": "on"}}
    config = SparseSpecConfig(stride=3, min_tokens=16, **changes[request.param])
    toy = Watched(config, TorchPagedAttention())
    toy.canary = Canary(toy.table)
    toy.rounds.graphs._step = lambda key: toy.rounds.rounds.step(
        # As in a graph for more: slots that stay empty.
        min(SLOTS, key.nd + 2) if key.nd else 0,
        min(SLOTS, key.nv + 1) if key.nv else 0,
        scored=key.scored,
        queries=key.width or None,
    )
    for pool, length in toy.committed.items():
        toy.canary.prefill(pool, length)
    return toy


def test_the_canary_finds_nothing_over_rounds_of_any_kind(toy):
    rng = random.Random(2)
    for _ in range(6):
        pools = rng.sample(range(1, SLOTS + 1), rng.randint(1, 4))
        drafts = rng.choice([0, 1, 3]) if toy.config.may_adapt else None
        total = 3 if toy.config.lookup == "on" and drafts else None
        toy.run(pools, drafts=drafts, total=total)
    assert toy.canary.found.item() == 0
    for pool, length in toy.committed.items():  # and all that is committed was noted
        kept = toy.canary.context.canary_buf.view(torch.int64)[toy.table[pool, :length].long()]
        assert kept[:, consts.CANARY_FIELD_POSITION].tolist() == list(range(length))


def test_the_canary_finds_a_slot_that_another_request_has_overwritten(toy):
    toy.run([1, 2])
    toy.canary.context.canary_buf.view(torch.int64)[toy.table[2, 5].long(), consts.CANARY_FIELD_TOKEN] += 1
    toy.run([1])
    assert toy.canary.found.item() == 0
    toy.run([1, 2])
    assert toy.canary.found.item() > 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_canary_checks_no_order_of_steps_during_capture_and_does_so_after_it(fails):
    asserts, positions = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    def begin():
        asserts.fill_(1)
        positions.fill_(1)

    canary = SimpleNamespace(
        _single_forward_managers=[
            SimpleNamespace(phase_checker=SimpleNamespace(_enable_assert_device=asserts))
        ],
        _device_state=SimpleNamespace(enable_chain_position_assert=positions),
        mark_init_finished=begin,
    )
    with (
        pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(),
        compat.canary_at_rest(SimpleNamespace(canary_manager=canary)),
    ):
        assert asserts.item() == positions.item() == 0
        if fails:
            raise ZeroDivisionError
    assert asserts.item() == positions.item() == 1


def test_a_server_without_the_canary_captures_as_it_is():
    with compat.canary_at_rest(SimpleNamespace(canary_manager=None)):
        pass
