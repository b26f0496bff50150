"""`python -m sglang_sparsespec.doctor`: what is installed, what would be used, and a short self-test.

One line a finding, `[ok]`, `[warn]` or `[fail]`. Exit status: 0 when nothing failed, 1 when something did.
A check that raises is a finding too: nothing here hides an exception. No server is started.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_sparsespec.config import ALLOW_UNTESTED_ENV, ConfigError, SparseSpecConfig, resolve_config
from sglang_sparsespec.version import SUPPORTED_SGLANG, __version__

if TYPE_CHECKING:
    import torch

    from sglang_sparsespec.attention.interface import MicroStepAttention

    Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # drafts, verification, scores

ENTRY_POINTS = {"sglang.srt.plugins": "sparsespec", "sglang.srt.platforms": "sparsespec_cpu"}


@dataclass(frozen=True)
class Finding:
    check: str
    status: str  # ok, warn or fail
    text: str


Found = Iterable[tuple[str, str]]  # (status, text) of each finding of one check


# -- what is installed -------------------------------------


def check_versions() -> Found:
    yield "ok" if sys.version_info >= (3, 11) else "fail", f"python {platform.python_version()}"
    yield "ok", f"sglang-sparsespec {__version__} in {Path(__file__).parent}"
    installed = metadata.version("sglang")
    status = "ok" if installed == SUPPORTED_SGLANG else "fail"
    if status == "fail" and os.environ.get(ALLOW_UNTESTED_ENV) == "1":
        status = "warn"
    yield status, f"sglang {installed}; this package is made for {SUPPORTED_SGLANG}"
    import torch

    yield "ok", f"torch {torch.__version__}, built for CUDA {torch.version.cuda or 'no'}"


def check_plugins() -> Found:
    """The entry points are there, load, and registered the algorithm."""
    for group, name in ENTRY_POINTS.items():
        found = [point for point in metadata.entry_points(group=group) if point.name == name]
        if not found:
            yield "fail", f"{group} lacks the entry point {name!r}. Run: pip install sglang-sparsespec"
            continue
        found[0].load()
        yield "ok", f"entry point {name!r} of {group} loads {found[0].value}"
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_sparsespec.algorithm import NAME, SparseSpecAlgorithm

    with _logged_errors("sglang.srt.plugins") as errors:
        load_plugins()
    for error in errors:
        yield "fail" if "sparsespec" in error else "warn", error
    try:
        registered = isinstance(SpeculativeAlgorithm.from_string(NAME), SparseSpecAlgorithm)
    except ValueError:
        registered = False
    if registered:
        yield "ok", f"{NAME} is registered with SGLang"
    else:
        limits = [f"{n}={os.environ[n]}" for n in ("SGLANG_PLUGINS", "SGLANG_PLATFORM") if n in os.environ]
        yield "fail", f"{NAME} is not registered with SGLang. Environment: {' '.join(limits) or 'unchanged'}"


@contextlib.contextmanager
def _logged_errors(logger_name: str) -> Iterator[list[str]]:
    """Collect what a logger reports as an error: SGLang logs a failing plugin and goes on."""
    errors: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            cause = record.exc_info[1] if record.exc_info else None
            errors.append(record.getMessage() + (f": {_describe(cause)}" if cause else ""))
        return True

    logging.getLogger(logger_name).addFilter(note)
    try:
        yield errors
    finally:
        logging.getLogger(logger_name).removeFilter(note)


def check_contract() -> Found:
    from sglang_sparsespec import compat

    compat.check_contract(strict=True)
    yield "ok", f"kept: {len(compat.SIGNATURES)} signatures, {len(compat.BEHAVIOUR)} pieces of code"


def check_hooks() -> Found:
    from sglang_sparsespec import hooks

    hooks.verify(hooks.EVERYWHERE)
    yield "ok", f"in effect: {', '.join(hook.target for hook in hooks.EVERYWHERE)}"


# -- what would be used -------------------------------------


def check_config() -> Found:
    config = resolve_config()
    defaults = SparseSpecConfig().asdict()
    for key, value in config.asdict().items():
        given = "" if value == defaults[key] else f" (default {json.dumps(defaults[key])})"
        yield "ok", f"{key} = {json.dumps(value)}{given}"


def check_device() -> Found:
    import torch

    for index in range(torch.cuda.device_count()):
        if not torch.cuda.is_available():
            yield "fail", "there is a CUDA device, but torch cannot use it: the driver may be too old"
            return
        gpu = torch.cuda.get_device_properties(index)
        yield "ok", f"cuda:{index} {gpu.name}, {gpu.total_memory >> 30} GiB, sm_{gpu.major}{gpu.minor}"
    if not torch.cuda.device_count():
        yield "ok", f"no CUDA device; {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"


def check_platform() -> Found:
    from sglang.srt.platforms import current_platform

    from sglang_sparsespec import platforms

    live = type(current_platform).__name__
    chosen = platforms.activate()
    if chosen is None:
        yield "ok", f"the CPU platform is not active; SGLang uses {live}"
    elif live == chosen.rpartition(".")[2]:
        yield "ok", "the CPU platform is active: SGLang runs on plain torch, for trying and testing"
    else:
        yield "fail", f"the CPU platform should be active, but SGLang uses {live}"


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_attention() -> Found:
    import torch

    from sglang_sparsespec.attention import GRAPHED, choose_attention

    for name in ("sglang-kernel", "flashinfer-python", "sgl-kernel-ext"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield "ok", f"found {name} {metadata.version(name)}"
    device, asked = find_device(), resolve_config().attention
    serves = False
    for dtype, head_dim in itertools.product(("bfloat16", "float32"), (64, 128)):
        case = f"{dtype}, head dimension {head_dim}"
        try:
            chosen, obstacles = choose_attention(asked, device, getattr(torch, dtype), head_dim)
        except ConfigError as error:
            yield "warn", f"{case}: refused: {error}"
            continue
        serves = True
        graphs = "with CUDA graphs" if chosen in GRAPHED else "without CUDA graphs"
        faster = [f"{name}: {why}" for name, why in obstacles.items() if why and asked == "auto"]
        why = f" ({'; '.join(faster)})" if faster else " (asked for)" if asked != "auto" else ""
        yield "ok", f"{case}: {chosen}, {graphs}{why}"
    if not serves:
        yield "fail", f'attention "{asked}" serves nothing here: a server would end. Use "auto".'
    kind = resolve_config().draft_weights
    if "fp8" in kind and not device.startswith("cuda"):
        yield "fail", f'draft_weights "{kind}" needs a GPU: a server would end. Use "model" or "int4".'


# -- self-test -------------------------------------


def test_selection() -> Found:
    import torch

    from sglang_sparsespec.selection import make_selector

    lengths, width = [40, 17, 5, 1], 40
    prefix = torch.tensor(lengths, device=find_device())
    scores = torch.rand(len(lengths), 2, width, generator=torch.Generator().manual_seed(1))
    for name in ("pillar", "window"):
        config = SparseSpecConfig(selector=name, budget_ratio=0.25, min_tokens=3, sink=2, recent=1)
        given = scores.to(prefix.device) if name == "pillar" else None
        found, counts = make_selector(config).select(given, prefix, width=width, capacity=width)
        for row, head in itertools.product(range(len(lengths)), range(found.shape[1])):
            rank = scores[row, head].tolist() if name == "pillar" else list(range(width))
            kept = found[row, head, : int(counts[row])].tolist()
            wanted = _select_by_loop(rank, lengths[row], config)
            if kept != wanted:
                yield "fail", f"{name} kept {kept} of {lengths[row]} tokens, not {wanted}"
                return
    yield "ok", "pillar and window select what an obvious loop selects"


def _select_by_loop(rank: Sequence[float], length: int, config: SparseSpecConfig) -> list[int]:
    forced = [at for at in range(length) if at < config.sink or at >= length - config.recent]
    others = sorted(set(range(length)) - set(forced), key=lambda at: (-rank[at], at))
    return sorted((forced + others)[: config.budget(length)])


def test_acceptance() -> Found:
    """Tokens that come out of drafting and rejection follow the target's law, whatever the drafts' law is."""
    import torch

    from sglang_sparsespec.sampling.accept import accept_drafts, draft_tokens
    from sglang_sparsespec.sampling.filters import SamplingRows

    rows, stride, vocabulary, device = 20_000, 2, 5, find_device()
    generator = torch.Generator(device=device).manual_seed(0)
    laws = torch.randn(2 * stride + 1, vocabulary, generator=torch.Generator().manual_seed(7)).to(device)
    ones = torch.ones(rows, device=device)
    sampled = SamplingRows(ones, ones.int() * (1 << 30), ones, ones * 0, False, False, False)
    drafts = [
        draft_tokens(laws[stride + 1 + at].expand(rows, -1), sampled, support=3, generator=generator)
        for at in range(stride)
    ]
    out = accept_drafts(
        laws[: stride + 1].expand(rows, -1, -1),
        torch.stack([d.tokens for d in drafts], 1),
        torch.full((rows,), stride, device=device),
        sampled,
        support_ids=torch.stack([d.support_ids for d in drafts if d.support_ids is not None], 1),
        support_probs=torch.stack([d.support_probs for d in drafts if d.support_probs is not None], 1),
        generator=generator,
    )
    distances = []
    for at in range(stride + 1):
        counts = out.tokens[out.lengths > at, at].bincount(minlength=vocabulary).double()
        expected = laws[at].double().softmax(0) * counts.sum()
        distances.append(float(((counts - expected) ** 2 / expected).sum()))
    told = ", ".join(f"{distance:.1f}" for distance in distances)
    # Chi-square with 4 degrees of freedom stays below 33 but for one time in a million. NaN is not below.
    status = "ok" if all(distance < 33 for distance in distances) else "fail"
    yield status, f"sampled tokens against the target's law: chi-square {told}; limit 33"


def test_attention() -> Found:
    import torch

    from sglang_sparsespec.attention import obstacle
    from sglang_sparsespec.attention.torch_reference import TorchAttention

    case = _AttentionCase(torch.float32, heads=4, kv_heads=2, head_dim=64, lengths=(37, 5))
    yield _compare("torch attention and float64", case.run(TorchAttention(case.table)), case.loop(), 1e-4)
    if obstacle("flashinfer", find_device(), torch.bfloat16, 128):
        return
    from sglang_sparsespec.attention.flashinfer import FlashInferAttention

    case = _AttentionCase(torch.bfloat16, heads=32, kv_heads=8, head_dim=128, lengths=(900, 33, 4))
    fast = FlashInferAttention(case.table, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    yield _compare("flashinfer and torch", case.run(fast), case.run(TorchAttention(case.table)), 3e-2)


def _compare(what: str, one: Results, other: Results, limit: float) -> tuple[str, str]:
    errors = [float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True)]
    told = "drafts {:.1e}, verification {:.1e}, scores {:.1e}".format(*errors)
    text = f"{what} differ by at most: {told}; limit {limit:.0e}"
    return "ok" if all(error < limit for error in errors) else "fail", text


class _AttentionCase:
    """Draft and verify rows over a small random KV pool. Row r has `lengths[r]` tokens before its queries."""

    QUERIES = 3

    def __init__(
        self, dtype: Any, heads: int, kv_heads: int, head_dim: int, lengths: tuple[int, ...]
    ) -> None:
        import torch

        from sglang_sparsespec.attention.interface import DraftRows, LayerKV, VerifyRows

        generator, device, count = torch.Generator().manual_seed(3), find_device(), len(lengths)
        width = max(lengths) + self.QUERIES

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        pools, self.lengths = torch.arange(count, device=device), lengths
        order = torch.randperm(count * width, generator=generator) + 1
        self.table = order.view(count, width).to(device, torch.int32)
        k, v = (normal(count * width + 1, kv_heads, head_dim) for _ in range(2))
        self.layer = LayerKV(index=0, k=k, v=v, scale=head_dim**-0.5, heads=heads)
        self.q_draft = normal(count, heads, head_dim)
        self.q_verify = normal(count, self.QUERIES, heads, head_dim)
        first = torch.tensor(lengths, device=device)
        self.drafts = DraftRows(pools, first, max(lengths), lengths, exact=True)
        queries = torch.full((count,), self.QUERIES, device=device)
        self.verifies = VerifyRows(pools, first, queries, lengths, self.QUERIES)
        # The selection is all that stands before the queries, so one loop can check drafts too.
        self.slots = self.table[:, None, : max(lengths)].long()

    def run(self, attention: MicroStepAttention) -> Results:
        attention.plan(self.drafts, self.verifies)
        draft = attention.draft(self.layer, self.q_draft, self.slots)
        verify, scores = attention.verify(self.layer, self.q_verify, scores=True)
        if scores is None:
            raise RuntimeError(f"attention {attention.name} gave no scores.")
        return draft, verify, scores

    def loop(self) -> Results:
        """The same, by loops over rows and queries in float64."""
        import torch

        drafts, verifies, scores = [], [], []
        for row, length in enumerate(self.lengths):
            drafts.append(self._one(self.q_draft[row], row, length)[0])
            total = torch.zeros(self.layer.k.shape[1], max(self.lengths) + self.QUERIES).to(drafts[0])
            seen = torch.zeros_like(total)
            for query in range(self.QUERIES):
                end = length + query + 1
                out, probs = self._one(self.q_verify[row, query], row, end)
                verifies.append(out)
                total[:, :end] += probs.view(len(total), -1, end).mean(1)
                seen[:, :end] += 1
            scores.append(total / seen.clamp(min=1))
        return torch.stack(drafts), torch.stack(verifies).view(self.q_verify.shape), torch.stack(scores)

    def _one(self, q: torch.Tensor, row: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [heads, head_dim] and probabilities [heads, end] of a query over the row's first tokens."""
        slots, group = self.table[row, :end].long(), self.layer.heads // self.layer.k.shape[1]
        k = self.layer.k[slots].double().repeat_interleave(group, 1).transpose(0, 1)
        v = self.layer.v[slots].double().repeat_interleave(group, 1).transpose(0, 1)
        probs = ((k @ q.double()[..., None]).squeeze(-1) * self.layer.scale).softmax(-1)
        return (probs[:, None] @ v).squeeze(1), probs


# -- the run -------------------------------------

CHECKS: tuple[tuple[str, Callable[[], Found]], ...] = (
    ("version", check_versions),
    ("plugin", check_plugins),
    ("contract", check_contract),
    ("hook", check_hooks),
    ("configuration", check_config),
    ("device", check_device),
    ("platform", check_platform),
    ("attention", check_attention),
    ("self-test", test_selection),
    ("self-test", test_acceptance),
    ("self-test", test_attention),
)


def diagnose(checks: Iterable[tuple[str, Callable[[], Found]]] = CHECKS) -> Iterator[Finding]:
    """Run the checks in turn. One that raises fails, and the others still run."""
    for name, check in checks:
        try:
            for status, text in check():
                yield Finding(name, status, text)
        except (Exception, SystemExit) as error:
            yield Finding(name, "fail", _describe(error))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_sparsespec.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    as_json = parser.parse_args(argv).json
    warnings.filterwarnings("ignore", module="sglang")  # of what a CPU lacks, at import
    found = []
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # imports may print
        for finding in diagnose():
            found.append(finding)
            if not as_json:
                print(f"{f'[{finding.status}]':6} {finding.check}: {finding.text}", flush=True)
    failed = sum(finding.status == "fail" for finding in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print(f"{failed} of {len(found)} findings failed." if failed else "All is well.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
