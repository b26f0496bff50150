"""The resolved configuration of SPARSESPEC: SGLang's own flags plus one JSON object.

No torch here: this module is imported by the launcher before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_ENV = "SGLANG_SPARSESPEC_CONFIG"
CONFIG_SOURCE = f"--sparsespec-config or {CONFIG_ENV}"  # the flag sets the variable
ALLOW_UNTESTED_ENV = "SGLANG_SPARSESPEC_ALLOW_UNTESTED"
KNOWN_ENV = (CONFIG_ENV, ALLOW_UNTESTED_ENV)
ENV_PREFIX = "SGLANG_SPARSESPEC_"
MAX_STRIDE = 32


class ConfigError(ValueError):
    """A configuration that cannot be used. The text names the key, what was given and what is allowed."""


def _key(default: Any, doc: str, **rules: Any) -> Any:
    return field(default=default, metadata={"doc": doc, **rules})


@dataclass(frozen=True)
class SparseSpecConfig:
    """All that SPARSESPEC can be told. Immutable; `asdict()` is what `/server_info` shows.

    Raises:
        ConfigError: a value has the wrong type or lies outside what its field allows.
    """

    stride: int = _key(8, "drafts per round, k (SGLang's --speculative-num-steps)", low=1, high=MAX_STRIDE)
    selector: str = _key(
        "pillar", "how the draft's KV tokens are chosen", choices=("pillar", "window", "random")
    )
    budget_ratio: float = _key(
        0.05, "share of the context a draft attends to", low=0.0, high=1.0, exclusive_low=True
    )
    min_tokens: int = _key(512, "smallest budget, in tokens", low=1, high=1 << 20)
    sink: int = _key(4, "first tokens of the context, always kept besides the budget", low=0, high=1 << 16)
    recent: int = _key(
        0, "tokens just before the last verification, always kept besides the budget", low=0, high=1 << 16
    )
    index_scope: str = _key(
        "layer", "whether the heads of a layer share one selection", choices=("layer", "kv_head")
    )
    schedule: str = _key(
        "lockstep",
        "when the requests of a batch verify ('auto': either, by measured times)",
        choices=("lockstep", "unified", "auto"),
    )
    adapt: str = _key(
        "auto",
        "fewer drafts, or none, where measured times say that it is faster ('auto': where the attention can)",
        choices=("auto", "on", "off"),
    )
    draft_support: int = _key(
        64, "most tokens a sampled draft is drawn from (temperature > 0)", low=1, high=4096
    )
    attention: str = _key(
        "auto",
        "attention of draft and verify rows ('torch_paged' is the slow reference of the CUDA-graph path)",
        choices=("auto", "fused", "fa3", "triton", "flashinfer", "torch", "torch_paged"),
    )
    draft_weights: str = _key(
        "model",
        "weights that drafts read: the model's own, or quantised copies beside them (lossless all the same)",
        choices=("model", "fp8", "int8", "int4", "int4+fp8"),
    )
    lookup: str = _key(
        "off",
        "'on': rounds may be filled with what followed the same tokens earlier in the context, where it pays",
        choices=("off", "on"),
    )
    score_layer_stride: int = _key(
        1, "adjacent layers that share a selection; one in so many is scored", low=1, high=64
    )
    score_every: int = _key(
        1, "rounds between two selections; the others keep the last one and all tokens since", low=1, high=16
    )
    offload: str = _key(
        "off",
        "'on': KV of requests that leave a full pool goes to host memory, and back; 'auto': where it fits",
        choices=("off", "auto", "on"),
    )
    checkpoint_tokens: int = _key(
        1024, "with offload: tokens that a running request's KV is copied to the host by", low=1, high=1 << 20
    )
    offload_watermark: float = _key(
        0.8,
        "with offload: share of the KV pool in use from which KV is copied to the host",
        low=0.0,
        high=1.0,
    )
    admit_ahead: int = _key(
        256, "with offload: most tokens of room that each request should find to grow", low=1, high=1 << 20
    )
    debug_drafts: str = _key(
        "off", "'wrong' makes every draft wrong: a test of the rejection path", choices=("off", "wrong")
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_value(spec, getattr(self, spec.name))
        if self.adapt == "on" and self.schedule == "unified":
            raise ConfigError(
                "adapt is 'on' and schedule is 'unified', whose rounds always have k drafts. Use schedule "
                "'lockstep', or adapt 'off'."
            )
        if self.lookup == "on" and not self.may_adapt:
            raise ConfigError(
                "lookup is 'on', and adapt is 'off' or schedule is 'unified': there, every round has k drafts"
                " and no room for more. Use adapt 'auto' with schedule 'lockstep' or 'auto', or lookup 'off'."
            )
        if self.adapt == "off" and self.schedule == "auto":
            raise ConfigError(
                "schedule is 'auto', which chooses by measured times, and adapt is 'off'. Use adapt 'auto', "
                "or schedule 'lockstep' or 'unified'."
            )
        if self.draft_weights != "model" and self.schedule == "unified":
            raise ConfigError(
                f"draft_weights is {self.draft_weights!r} and schedule is 'unified': there, drafts and "
                "verifications share a forward pass and so its weights. Use schedule 'lockstep', or "
                "draft_weights 'model'."
            )

    @property
    def may_adapt(self) -> bool:
        """Whether rounds choose how many drafts they make, if the attention lets them."""
        return self.adapt != "off" and self.schedule != "unified"

    def budget(self, length: int) -> int:
        """Tokens a draft row keeps of a context of `length` tokens, sinks and recent ones included."""
        return self.budgets([length])[0]

    def budgets(self, lengths: Sequence[int]) -> list[int]:
        """`budget` of each; a round asks for hundreds."""
        ppm, least, kept = self.ratio_ppm, self.min_tokens, self.kept
        found = []
        for n in lengths:  # without min and max, whose calls take longer than all else
            budget = -(-n * ppm // 1_000_000)
            budget = (budget if budget > least else least) + kept
            found.append(n if n < budget else budget)
        return found

    @property
    def kept(self) -> int:
        """Tokens kept besides the budget."""
        return self.sink + self.recent

    def selection_groups(self, layers: int) -> int:
        """Selections that a model of `layers` attention layers keeps."""
        return -(-layers // self.score_layer_stride)

    @property
    def most_since_selection(self) -> int:
        """Most tokens between a selection's prefix and a draft of the last round that uses it, both included:
        every verification commits up to k+1 tokens, the last round drafts k more."""
        return self.score_every * (self.stride + 1) + self.stride + 1

    @property
    def ratio_ppm(self) -> int:
        """The budget ratio in millionths: integers, so that host and device round the budget alike."""
        return round(self.budget_ratio * 1_000_000)

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def keys(cls) -> list[str]:
        return [spec.name for spec in dataclasses.fields(cls)]

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], *, source: str = CONFIG_SOURCE) -> SparseSpecConfig:
        """Build from a JSON object. Raises ConfigError on an unknown key or a bad value."""
        known = cls.keys()
        for key in raw:
            if key not in known:
                raise ConfigError(f"{source}: unknown key {key!r}{_nearest(key, known)}")
        values = {name: _widen(cls, name, value) for name, value in raw.items()}
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None


def _widen(cls: type[SparseSpecConfig], name: str, value: Any) -> Any:
    """JSON has one kind of number: 1 is a fine float."""
    spec = next(s for s in dataclasses.fields(cls) if s.name == name)
    if isinstance(spec.default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _nearest(given: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f". Valid keys: {', '.join(sorted(allowed))}{hint}"


def _check_value(spec: dataclasses.Field, value: Any) -> None:
    rules = spec.metadata
    wanted = type(spec.default)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ConfigError(
            f"{spec.name} must be {_type_name(wanted)}, got {json.dumps(value, default=repr)} "
            f"({type(value).__name__}). {_allowed(spec)}"
        )
    if "choices" in rules and value not in rules["choices"]:
        raise ConfigError(f"{spec.name} is {value!r}. {_allowed(spec)}")
    if "low" in rules:
        too_low = value <= rules["low"] if rules.get("exclusive_low") else value < rules["low"]
        # `not (value <= high)` also refuses NaN.
        if too_low or not (value <= rules["high"]):
            raise ConfigError(f"{spec.name} is {value!r}. {_allowed(spec)}")


def _allowed(spec: dataclasses.Field) -> str:
    rules = spec.metadata
    if "choices" in rules:
        return "Allowed: " + ", ".join(rules["choices"]) + f" (default {spec.default})."
    low = f"above {rules['low']}" if rules.get("exclusive_low") else f"from {rules['low']}"
    return f"Allowed: {_type_name(type(spec.default))} {low} to {rules['high']} (default {spec.default})."


def _type_name(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "a string"}[kind]


def parse_config_text(text: str, *, source: str = CONFIG_SOURCE) -> dict[str, Any]:
    """Parse `text`: a JSON object, or the path of a file that holds one (`@path` works too).

    Raises:
        ConfigError: the file cannot be read, the JSON is broken, a key stands twice, or it is no object.
    """
    text = text.strip()
    if not text:
        return {}
    if not text.startswith(("{", "[")):
        path = Path(os.path.expanduser(text.removeprefix("@")))
        try:
            source, text = f"{source} (file {path})", path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"{source}: {str(path)!r} is neither a JSON object nor a readable file ({why}). "
                'Give JSON such as {"budget_ratio": 0.05}, or the path of a JSON file.'
            ) from None
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}. Given: {text[:200]!r}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: a JSON object is needed, got {type(raw).__name__}: {text[:200]!r}")
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f"{CONFIG_SOURCE}: key {key!r} stands twice; keep one.")
        seen[key] = value
    return seen


def resolve_config(
    *,
    num_steps: int | None = None,
    num_draft_tokens: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> SparseSpecConfig:
    """Merge SGLang's flags with the JSON object of `SGLANG_SPARSESPEC_CONFIG`.

    Args:
        num_steps: `--speculative-num-steps` as given, k.
        num_draft_tokens: `--speculative-num-draft-tokens` as given, k + 1.
        environ: environment to read; the process's own by default.

    Raises:
        ConfigError: the flags and the JSON disagree about k, or anything in them is not allowed.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in KNOWN_ENV:
            close = difflib.get_close_matches(name, KNOWN_ENV, n=1, cutoff=0.3)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"unknown environment variable {name}. Known: {', '.join(KNOWN_ENV)}.{hint}")
    raw = parse_config_text(environ.get(CONFIG_ENV, ""))
    stride = _agree_on_stride(num_steps, num_draft_tokens, raw.get("stride"))
    # A null stride stays, to be refused.
    return SparseSpecConfig.from_mapping(raw if stride is None else {"stride": stride, **raw})


def _agree_on_stride(num_steps: int | None, num_draft_tokens: int | None, key: Any) -> Any:
    given = {
        "--speculative-num-steps": num_steps,
        "--speculative-num-draft-tokens": None if num_draft_tokens is None else num_draft_tokens - 1,
        f'"stride" in {CONFIG_SOURCE}': key,
    }
    stated = {name: value for name, value in given.items() if value is not None}
    if len({repr(value) for value in stated.values()}) > 1:
        told = "; ".join(f"{name} means k = {value}" for name, value in stated.items())
        raise ConfigError(
            f"the number of drafts per round is given twice and differs: {told}. "
            "--speculative-num-draft-tokens must be k + 1. Give one of them, or make them agree."
        )
    return next(iter(stated.values()), None)
