"""Penalties, minimum lengths, logit bias, grammars and logit processors, exact at every position of a round.

Position i of a verification predicts the token after drafts 1 to i, so it counts those too: greedy output is
that of plain decoding, and sampled output follows the same law. (SGLang's other speculative algorithms apply
the penalties of a round's start to all its positions.) Drafts are adjusted as well, which raises acceptance,
but not by grammars and processors, which are the host's. As in SGLang, only output tokens count; the order is
additive penalties, repetition, grammar, bias, processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_sparsespec import compat
from sglang_sparsespec.sampling.upload import upload


def counts_tokens(params: Any) -> bool:
    """Whether SGLang's `SamplingParams` make logits depend on what was put out before."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def needs_adjusting(params: Any) -> bool:
    """Whether they ask for anything that this module does on the device."""
    return counts_tokens(params) or bool(params.logit_bias)


def needs_the_host(batch: Any) -> bool:
    """Whether some request of SGLang's `ScheduleBatch` has its logits changed by what the host knows."""
    return batch.has_grammar or compat.has_processors(batch)


def stop_ids(req: Any) -> set[int]:
    """Tokens that end a request of SGLang, which a minimum length forbids."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        found |= {req.tokenizer.eos_token_id} - {None}
    return found


class OutputCounts:
    """How often each token was put out, for the requests that need it: a line each, made when they begin."""

    def __init__(self, vocabulary: int, device: torch.device | str) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.lines = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        self._line_of: dict[int, int] = {}  # pool row -> line

    def begin(self, reqs: Sequence[Any], pools: Sequence[int], tokens: torch.Tensor) -> None:
        """A prefill of `reqs` gave `tokens` [B], which the host does not know yet."""
        for at, (req, pool) in enumerate(zip(reqs, pools, strict=True)):
            if not counts_tokens(req.sampling_params):
                continue
            at_line = self._line(pool)  # may make the table grow
            line = self.lines[at_line]
            line.zero_()
            # What a retracted request had put out before.
            if before := list(req.output_ids):
                ids = upload(before, self.device, torch.int64)
                line.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            line.scatter_add_(0, tokens[at : at + 1].long(), line.new_ones(1))

    def _line(self, pool: int) -> int:
        if pool not in self._line_of:
            self._line_of[pool] = len(self._line_of)
            if len(self._line_of) > len(self.lines):
                grown = self.lines.new_zeros(max(4, 2 * len(self.lines)), self.vocabulary)
                grown[: len(self.lines)] = self.lines
                self.lines = grown
        return self._line_of[pool]

    def adjustment(self, batch: Any, pools: Sequence[int]) -> Adjustment | None:
        """For a decode batch of SGLang; None where no request asks for any."""
        if needs_the_host(batch) or any(needs_adjusting(req.sampling_params) for req in batch.reqs):
            return Adjustment(self, batch, pools)
        return None

    def index(self, pools: Sequence[int], counted: Sequence[bool]) -> torch.Tensor:
        """Lines of requests; whoever does not count has none of its own and gets the first."""
        lines = [self._line(pool) if yes else 0 for pool, yes in zip(pools, counted, strict=True)]
        return upload(lines, self.device, torch.int64)


class Adjustment:
    """What the requests of one round want done to their logits. Tensors are in the order of the batch."""

    def __init__(self, counts: OutputCounts, batch: Any, pools: Sequence[int]) -> None:
        params = [req.sampling_params for req in batch.reqs]
        # Rounds of these run one at a time: what the host knows is the state after the last verification.
        self._grammars = batch.reqs if batch.has_grammar else None
        self._processed = batch.reqs if compat.has_processors(batch) else None
        self._bias: torch.Tensor | None = batch.sampling_info.logit_bias  # [B, V]
        self._counts = counts
        self._counted = [counts_tokens(p) for p in params]
        if any(self._counted):
            self._at = counts.index(pools, self._counted)
            self._use = upload(self._counted, counts.device)
            numbers = [
                (p.frequency_penalty, p.presence_penalty, p.repetition_penalty, float(p.min_new_tokens or 0))
                for p in params
            ]
            columns = upload(numbers, counts.device, torch.float32)
            self._frequency, self._presence, self._repetition, self._least = columns.unbind(dim=1)
            self._stops = self._stop_mask(batch.reqs)

    def _stop_mask(self, reqs: Sequence[Any]) -> torch.Tensor | None:
        """[B, V]: whether a token ends the request; None where there is no minimum length."""
        if not any(req.sampling_params.min_new_tokens for req in reqs):
            return None
        shape, device = (len(reqs), self._counts.vocabulary), self._counts.device
        ids = [(row, i) for row, req in enumerate(reqs) for i in stop_ids(req) if 0 <= i < shape[1]]
        flat = upload([row * shape[1] + i for row, i in ids], device, torch.int64)
        return (
            torch.zeros(shape, dtype=torch.bool, device=device)
            .view(-1)
            .index_fill_(0, flat, True)
            .view(shape)
        )

    def of_drafts(
        self, logits: torch.Tensor, requests: torch.Tensor, tokens: torch.Tensor, drafted: torch.Tensor
    ) -> torch.Tensor:
        """Logits [n, V] of draft rows; `tokens` [n, k]: the row's drafts, of which `drafted` [n] exist."""
        seen = None
        if any(self._counted):
            seen = self._counts.lines[self._at[requests]]
            exists = torch.arange(tokens.shape[1], device=tokens.device) < drafted[:, None]
            seen.scatter_add_(1, tokens.long(), exists.to(seen.dtype))
        return self._biased(self._penalised(logits, requests, seen), requests)

    def of_verifications(
        self, logits: torch.Tensor, requests: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, Q, V] of verifications; `drafts` [R, Q-1], of which later ones may not exist."""
        seen = self._counts.lines[self._at[requests]] if any(self._counted) else None
        found = [self._penalised(logits[:, 0], requests, seen)]
        for position in range(1, logits.shape[1]):
            if seen is not None:
                draft = drafts[:, position - 1 : position].long()
                seen.scatter_add_(1, draft, torch.ones_like(draft, dtype=seen.dtype))
            found.append(self._penalised(logits[:, position], requests, seen))
        out = torch.stack(found, dim=1)
        if self._grammars is not None:
            compat.mask_by_grammars(out, [self._grammars[row] for row in requests.tolist()], drafts)
        out = self._biased(out, requests)
        if self._processed is not None:
            compat.process_logits(out, [self._processed[row] for row in requests.tolist()], drafts)
        return out

    def _biased(self, logits: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """`logits` [n, V] or [n, Q, V] of `requests`."""
        if self._bias is None:
            return logits
        bias = self._bias[requests]
        return logits + (bias if logits.dim() == 2 else bias[:, None])

    def _penalised(
        self, logits: torch.Tensor, requests: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """`logits` [n, V] of `requests` that have put out every token `seen` [n, V] times."""
        out = logits.float()
        if seen is not None:
            counts = seen * self._use[requests, None]
            present = counts > 0
            out = out - self._frequency[requests, None] * counts - self._presence[requests, None] * present
            if self._stops is not None:
                short = counts.sum(dim=1, keepdim=True) < self._least[requests, None]
                out = out.masked_fill(short & self._stops[requests], -torch.inf)
            scale = torch.where(present, self._repetition[requests, None], 1.0)
            out = torch.where(out < 0, out * scale, out / scale)
        return out

    def accepted(self, requests: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Verifications of `requests` [R] put out the first `lengths` [R] of `tokens` [R, Q]."""
        if not any(self._counted):
            return
        counts = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]) & self._use[
            requests, None
        ]
        self._counts.lines.index_put_(
            (self._at[requests, None].expand_as(tokens), tokens.long().clamp(0, self._counts.vocabulary - 1)),
            counts.to(self._counts.lines.dtype),
            accumulate=True,
        )
