"""Prompts of an exact length: the starts of solved reasoner problems, cut in the middle of the worked chain.

A trace is one problem of `benchmark/reasoner` in the training format (prompt and worked chain), made by its
generator and not by a model, tokenized with the served model's tokenizer and cut to `context` tokens. The
problem goes on for at least `new_tokens` more, so that a model that knows the format is still at work while
it is measured. No two problems are joined. Requests share no more than the opening words of a family
(`shared_prefix` tells how many tokens). The reasoner was trained on documents of at most 16,384 tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REASONER = Path(__file__).parents[1] / "reasoner"
FORMAT = 1
CHAIN_TOKENS = 64  # of the chain, at least, that a trace holds behind the problem's text
TRIES_PER_FAMILY = 6
SAMPLE = "<|im_start|>user\nrun the ledger with numbers 00 to 99\nx = 17 + 25 ; Done?"

Encode = Callable[[str], list[int]]


class TraceError(ValueError):
    """Traces that cannot be made or read. The text says what was asked for and what to do."""


@dataclass(frozen=True)
class Trace:
    """`ids`: token ids, exactly as many as asked for. `prompt_tokens`: how many of them are the problem."""

    family: str
    prompt_tokens: int
    ids: list[int]


def load_encoder(model_path: str) -> Encode:
    """The tokenizer of a model folder or name, as a function of a text that holds its own chat marks."""
    from transformers import AutoTokenizer  # seconds to import: not at the top

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def make_traces(count: int, context: int, new_tokens: int, *, seed: int, encode: Encode) -> list[Trace]:
    """`count` traces of exactly `context` tokens, the families in turn.

    A family that has no problem this long is left out (bfs and bucket beyond about 10k tokens).

    Raises:
        TraceError: no family has a problem of `context + new_tokens` tokens.
    """
    if str(REASONER) not in sys.path:
        sys.path.append(str(REASONER))
    import synth

    maker = synth.DocMaker(seed * 1_000_003 + context)
    needed, scale = context + new_tokens, 1.0
    families, traces, seen = list(synth.FAMS), [], set()
    while len(traces) < count and families:
        family = families[len(traces) % len(families)]
        for _ in range(TRIES_PER_FAMILY):
            size = int(needed * 1.3 * scale)
            doc = maker.doc(size, family, lo=needed / size)
            if doc is None:
                continue
            head = synth.render_prompt(doc["prompt"])
            ids = encode(head + synth.render_completion(doc["trace"], doc["answer"]))
            if len(ids) < needed:  # this tokenizer makes fewer tokens, or the family is short
                scale = min(8.0, max(scale, len(doc["p"] + doc["c"]) / len(ids)))
                continue
            prompt_tokens = len(encode(head))
            key = tuple(ids[:context])
            if prompt_tokens <= context - CHAIN_TOKENS and key not in seen:
                seen.add(key)
                traces.append(Trace(family, prompt_tokens, ids[:context]))
                break
        else:
            families.remove(family)
    if len(traces) < count:
        raise TraceError(
            f"no family of benchmark/reasoner has a problem of {needed} tokens ({context} of context and "
            f"{new_tokens} new ones) whose text leaves {CHAIN_TOKENS} tokens of chain. "
            "Take another --context, or give --traces a file with your own."
        )
    return traces


def shared_prefix(traces: Sequence[Trace]) -> int:
    """The most leading tokens that two of the traces have in common; 0 for fewer than two."""
    ordered = sorted(trace.ids for trace in traces)

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    return max((common(a, b) for a, b in itertools.pairwise(ordered)), default=0)


def fingerprint(encode: Encode) -> str:
    """Names a tokenizer by what it makes of a fixed text."""
    return hashlib.sha256(json.dumps(encode(SAMPLE)).encode()).hexdigest()[:16]


class TraceStore:
    """Traces by context, kept in a JSON file where a path is given.

    Args:
        path: {"format": 1, "tokenizer": fingerprint, "sets": [{"context", "new_tokens", "seed", "traces":
            [{"family", "prompt_tokens", "ids"}]}]}. Made when missing, added to when it lacks a set.
        encode: the served model's tokenizer.

    Raises:
        TraceError: the file is none of these, or was made with another tokenizer.
    """

    def __init__(self, path: Path | None, encode: Encode, *, seed: int = 1) -> None:
        self._path, self._encode, self._seed = path, encode, seed
        self._data: dict[str, Any] = {"format": FORMAT, "tokenizer": fingerprint(encode), "sets": []}
        if path is not None and path.exists():
            self._data = self._read(path)

    def get(self, count: int, context: int, new_tokens: int) -> list[Trace]:
        """`count` traces of exactly `context` tokens, whose problems last `new_tokens` more."""
        for known in self._data["sets"]:
            same = known["context"] == context and known["seed"] == self._seed
            if same and known["new_tokens"] >= new_tokens and len(known["traces"]) >= count:
                return [Trace(**trace) for trace in known["traces"][:count]]
        traces = make_traces(count, context, new_tokens, seed=self._seed, encode=self._encode)
        made = {"context": context, "new_tokens": new_tokens, "seed": self._seed}
        self._data["sets"].append({**made, "traces": [asdict(trace) for trace in traces]})
        if self._path is not None:
            draft = self._path.with_name(self._path.name + ".tmp")
            draft.write_text(json.dumps(self._data) + "\n", encoding="utf-8")
            draft.replace(self._path)  # half a file would be refused ever after
        return traces

    def _read(self, path: Path) -> dict[str, Any]:
        again = "Name another file: it is then made anew."
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            lengths = [
                (known["context"], len(trace["ids"])) for known in data["sets"] for trace in known["traces"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"--traces: cannot read {str(path)!r}: {error!r}. {again}") from None
        if data.get("format") != FORMAT or data.get("tokenizer") != self._data["tokenizer"]:
            raise TraceError(
                f"--traces: {str(path)!r} is of format {data.get('format')}, tokenizer "
                f"{data.get('tokenizer')}; "
                f"needed: {FORMAT}, {self._data['tokenizer']}. {again}"
            )
        if wrong := [(context, length) for context, length in lengths if context != length]:
            raise TraceError(
                f"--traces: {str(path)!r} has a trace of {wrong[0][1]} tokens among those of "
                f"{wrong[0][0]}. {again}"
            )
        return data
