"""Configuration: what is accepted, what is refused, and what the refusal tells."""

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
from sglang_sparsespec.config import (
    ALLOW_UNTESTED_ENV,
    CONFIG_ENV,
    MAX_STRIDE,
    ConfigError,
    SparseSpecConfig,
    parse_config_text,
    resolve_config,
)


def resolve(raw="", **flags):
    text = raw if isinstance(raw, str) else json.dumps(raw)
    return resolve_config(environ={CONFIG_ENV: text}, **flags)


def refused(*parts):
    """Expect a ConfigError whose text holds all `parts`."""
    return pytest.raises(ConfigError, match="".join(f"(?s:(?=.*{part}))" for part in parts))


# --- what is accepted ---


def test_defaults_are_those_of_the_design():
    config = resolve_config(environ={})
    assert (config.stride, config.selector, config.budget_ratio, config.min_tokens) == (
        8,
        "pillar",
        0.05,
        512,
    )
    assert (config.sink, config.index_scope, config.schedule) == (4, "layer", "lockstep")
    assert config == SparseSpecConfig()


def test_every_key_can_be_given():
    given = {
        "stride": 3,
        "selector": "window",
        "budget_ratio": 0.5,
        "min_tokens": 7,
        "sink": 0,
        "recent": 9,
        "index_scope": "kv_head",
        "schedule": "unified",
        "draft_support": 5,
        "attention": "torch",
        "draft_weights": "model",
        "adapt": "auto",
        "lookup": "off",
        "score_layer_stride": 2,
        "score_every": 3,
        "offload": "auto",
        "checkpoint_tokens": 64,
        "offload_watermark": 0.5,
        "admit_ahead": 32,
        "debug_drafts": "wrong",
    }
    assert sorted(given) == sorted(SparseSpecConfig.keys())
    assert resolve(given).asdict() == given


def test_a_whole_number_is_a_fine_ratio():
    config = resolve({"budget_ratio": 1})
    assert config.budget_ratio == 1.0
    assert isinstance(config.budget_ratio, float)


@pytest.mark.parametrize("key", ["stride", "min_tokens", "sink", "recent", "draft_support", "budget_ratio"])
def test_bounds_are_inclusive_where_they_say_so(key):
    spec = next(spec for spec in dataclasses.fields(SparseSpecConfig) if spec.name == key)
    low, high = spec.metadata["low"], spec.metadata["high"]
    assert getattr(resolve({key: high}), key) == high
    if spec.metadata.get("exclusive_low"):
        with refused(key, f"above {low}"):
            resolve({key: low})
    else:
        assert getattr(resolve({key: low}), key) == low
        with refused(key, f"from {low} to {high}"):
            resolve({key: low - 1})
    with refused(key, f"to {high}"):
        resolve({key: high + 1})


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseSpecConfig().stride = 3


def test_importing_it_imports_no_torch():
    code = (
        "import sys, sglang_sparsespec.config, sglang_sparsespec.rounds.planner\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- keys and values ---


@pytest.mark.parametrize(
    ("given", "near"), [("strid", "stride"), ("budget", "budget_ratio"), ("Sink", "sink")]
)
def test_an_unknown_key_names_the_nearest(given, near):
    with refused(
        CONFIG_ENV,
        "--sparsespec-config",
        f"unknown key '{given}'",
        "Valid keys: adapt, admit_ahead, attention, ",
        f"did you mean '{near}'",
    ):
        resolve({given: 1})


def test_a_key_like_no_other_names_all():
    with refused("unknown key 'zzzzzz'", *SparseSpecConfig.keys()) as caught:
        resolve({"zzzzzz": 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("stride", 2.0, "must be an integer, got 2.0 .float"),
        ("stride", "8", 'must be an integer, got "8" .str'),
        ("stride", True, "must be an integer, got true .bool"),
        ("stride", None, "must be an integer, got null .NoneType"),
        ("sink", [4], "must be an integer, got .4. .list"),
        ("budget_ratio", True, "must be a number, got true .bool"),
        ("budget_ratio", "5%", 'must be a number, got "5%" .str'),
        ("selector", 1, "must be a string, got 1 .int"),
    ],
)
def test_a_wrong_type_is_refused(key, value, told):
    with refused(CONFIG_ENV, f"{key} {told}", "Allowed:", "default"):
        resolve({key: value})


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused(value):
    with refused("budget_ratio is ", "Allowed: a number above 0.0 to 1.0"):
        resolve(f'{{"budget_ratio": {value}}}')


@pytest.mark.parametrize("key", ["selector", "index_scope", "schedule", "attention", "debug_drafts"])
def test_a_choice_names_the_others(key):
    spec = next(spec for spec in dataclasses.fields(SparseSpecConfig) if spec.name == key)
    with refused(f"{key} is 'nonsense'", *spec.metadata["choices"], f"default {spec.default}"):
        resolve({key: "nonsense"})


# --- the text ---


@pytest.mark.parametrize("text", ["", "   ", "{}", " {} \n"])
def test_nothing_given_is_the_default(text):
    assert resolve(text) == SparseSpecConfig()


@pytest.mark.parametrize("text", ['{"stride": }', "{stride: 3}", '{"stride": 3', '{"stride": 3} {}'])
def test_broken_json_is_refused(text):
    with refused("not valid JSON", "Given:"):
        resolve(text)


def test_a_key_that_stands_twice_is_refused():
    with refused("key 'stride' stands twice"):
        resolve('{"stride": 3, "stride": 3}')


def test_a_list_is_no_object():
    with refused("a JSON object is needed, got list"):
        resolve('[{"stride": 3}]')


@pytest.mark.parametrize("prefix", ["", "@"])
def test_a_file_is_read(tmp_path, prefix):
    path = tmp_path / "spec.json"
    path.write_text('\n {"stride": 5}\n')
    assert resolve(f"{prefix}{path}").stride == 5


@pytest.mark.parametrize("prefix", ["", "@"])
def test_a_missing_file_is_refused(tmp_path, prefix):
    with refused("neither a JSON object nor a readable file", "No such file", "Give JSON such as"):
        resolve(f"{prefix}{tmp_path}/none.json")


def test_a_folder_is_no_file(tmp_path):
    with refused("neither a JSON object nor a readable file", "directory"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "spec.bin"
    path.write_bytes(b"\xff\xfe\x00{}")
    with refused("neither a JSON object nor a readable file"):
        resolve(str(path))


def test_the_home_of_nobody_is_refused():
    with refused("neither a JSON object nor a readable file"):
        resolve("@~nosuchuser-sparsespec/spec.json")


@pytest.mark.parametrize("content", ["", "not json", '{"stride": }', "3"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "spec.json"
    path.write_text(content)
    with refused(f"file {path}", "JSON"):
        resolve(str(path))


def test_the_source_is_named():
    with refused("--my-flag: not valid JSON"):
        parse_config_text("{", source="--my-flag")


# --- flags and the object together ---


@pytest.mark.parametrize(
    "given",
    [
        {"num_steps": 5},
        {"num_draft_tokens": 6},
        {"num_steps": 5, "num_draft_tokens": 6},
        {"raw": {"stride": 5}},
        {"raw": {"stride": 5}, "num_steps": 5, "num_draft_tokens": 6},
    ],
)
def test_k_can_be_said_in_any_way(given):
    assert resolve(**given).stride == 5


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_steps": 5, "num_draft_tokens": 5}, ["num-steps means k = 5", "num-draft-tokens means k = 4"]),
        ({"num_steps": 5, "raw": {"stride": 6}}, ["num-steps means k = 5", '"stride" in .* means k = 6']),
        ({"num_draft_tokens": 5, "raw": {"stride": 6}}, ["means k = 4", '"stride" in .* means k = 6']),
        ({"num_steps": 1, "raw": {"stride": True}}, ["means k = 1", "means k = True"]),
    ],
)
def test_disagreement_about_k_names_all_that_was_said(given, told):
    with refused("given twice and differs", "must be k . 1", *told):
        resolve(**given)


@pytest.mark.parametrize("flags", [{"num_steps": 0}, {"num_steps": MAX_STRIDE + 1}, {"num_draft_tokens": 1}])
def test_flags_out_of_range_are_refused(flags):
    with refused("stride is", f"from 1 to {MAX_STRIDE}"):
        resolve(**flags)


def test_a_null_stride_is_not_replaced_silently_by_a_flag():
    with refused("stride"):
        resolve({"stride": None}, num_steps=5)


# --- environment ---


def test_an_unknown_variable_of_ours_is_refused():
    with refused("unknown environment variable SGLANG_SPARSESPEC_CONFG", f"Did you mean {CONFIG_ENV}"):
        resolve_config(environ={"SGLANG_SPARSESPEC_CONFG": "{}"})


def test_other_variables_are_none_of_our_business():
    environ = {"SGLANG_OTHER": "1", "PATH": "/bin", ALLOW_UNTESTED_ENV: "1", CONFIG_ENV: '{"stride": 2}'}
    assert resolve_config(environ=environ).stride == 2


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv(CONFIG_ENV, '{"sink": 11}')
    assert resolve_config().sink == 11


# --- budget ---


@pytest.mark.parametrize(
    ("given", "length", "budget"),
    [
        ({}, 1, 1),
        ({}, 516, 516),
        ({}, 517, 516),  # min_tokens + sink
        ({}, 10_240, 516),
        ({}, 10_241, 517),  # 512.05 rounds up
        ({}, 100_000, 5004),
        ({"budget_ratio": 1.0}, 12345, 12345),
        ({"budget_ratio": 0.5, "min_tokens": 1, "sink": 2, "recent": 3}, 100, 55),
        ({"budget_ratio": 0.5, "min_tokens": 1, "sink": 0}, 3, 2),
        ({"budget_ratio": 1e-9, "min_tokens": 1, "sink": 0}, 10**9, 1),
    ],
)
def test_the_budget_is_the_larger_of_both_and_what_is_kept(given, length, budget):
    assert SparseSpecConfig(**given).budget(length) == budget


@pytest.mark.parametrize("ratio", [0.001, 0.05, 1 / 3, 1.0])
def test_the_budget_never_shrinks_nor_exceeds_the_context(ratio):
    config = SparseSpecConfig(budget_ratio=ratio, min_tokens=8, sink=1, recent=2)
    budgets = [config.budget(length) for length in range(1, 3000)]
    assert all(budget <= length for length, budget in enumerate(budgets, 1))
    assert all(later - sooner in (0, 1) for sooner, later in itertools.pairwise(budgets))


def test_adapting_and_unified_exclude_each_other():
    with refused("adapt is 'on'", "schedule is 'unified'", "Use schedule 'lockstep'"):
        resolve({"adapt": "on", "schedule": "unified"})
    assert not resolve({"schedule": "unified"}).may_adapt
    assert not resolve({"adapt": "off"}).may_adapt
    for given in ({"adapt": "off"}, {"schedule": "unified"}):
        with refused("lookup is 'on'", "no room for more", "or lookup 'off'"):
            resolve({"lookup": "on", **given})
    with refused("schedule is 'auto'", "adapt is 'off'", "Use adapt 'auto'"):
        resolve({"adapt": "off", "schedule": "auto"})
    assert resolve({"adapt": "on", "schedule": "auto"}).may_adapt
    assert resolve({"schedule": "auto"}).may_adapt
    assert resolve({}).may_adapt


def test_budgets_of_many_are_those_of_each():
    config = SparseSpecConfig(budget_ratio=0.037, min_tokens=90, sink=3, recent=5)
    lengths = [0, 1, 89, 98, 99, 2431, 2432, 16_384, 131_072]
    assert config.budgets(lengths) == [config.budget(n) for n in lengths]
