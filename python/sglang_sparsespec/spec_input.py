"""The two `SpecInput`s that SGLang carries for us: between iterations, and into one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_sparsespec.rounds.batch import MicroStepBatch


@dataclass
class SparseDraftInput(SpecInput):
    """Carried from one scheduler iteration to the next. The worker's own state is on the device, by pool
    row."""

    bonus_tokens: torch.Tensor  # [B] int64: last emitted token of each request; it has no KV yet
    new_seq_lens: torch.Tensor  # [B] int64: committed lengths
    future_indices: torch.Tensor | None = None  # [B]; set by the scheduler under overlap

    # Read by SGLang's relay for every algorithm; nothing of the kind exists here.
    topk_p = None
    topk_index = None
    hidden_states = None

    def __post_init__(self) -> None:
        # The enum is closed to plugins; this member has no branch of its own for inputs between iterations.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def is_verify_input(self) -> bool:
        return False

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at `new_indices` ([n] int64), in that order."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: SparseDraftInput) -> None:
        """Append the requests of `other`."""
        if (self.future_indices is None) != (other.future_indices is None):
            raise RuntimeError("cannot merge a batch that waits for its forward with one that does not.")
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


@dataclass
class SparseVerifyInput(SpecInput):
    """One micro-step's forward: draft and verify rows together."""

    positions: torch.Tensor  # [T] int64
    micro_step: MicroStepBatch | None  # None: its lengths live on the device
    draft_token_num: int  # k+1: the widest row, by which SGLang sizes its reads
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    written: Any = None  # `compat.written_rows` where SGLang's KV canary watches

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.num_tokens_per_req = self.draft_token_num
        self.num_tokens_for_logprob_per_req = self.draft_token_num

    def is_verify_input(self) -> bool:
        return True
