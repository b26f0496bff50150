"""The contract with SGLang: kept by what is installed, broken loudly otherwise; hooks prove themselves."""

import ast
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import sglang
import sglang_sparsespec
from sglang.srt.plugins.hook_registry import HookType
from sglang_sparsespec import compat, hooks
from sglang_sparsespec.config import ALLOW_UNTESTED_ENV, SparseSpecConfig
from sglang_sparsespec.version import SUPPORTED_SGLANG

PACKAGE = Path(sglang_sparsespec.__file__).parent
SGLANG = Path(sglang.__file__).parent
WAYS_OUT = [
    "Ways out:",
    f"(1) pip install sglang=={SUPPORTED_SGLANG}",
    "(2) install the release of sglang-sparsespec",
    "(3) start without --speculative-algorithm SPARSESPEC",
]


@pytest.fixture(scope="module")
def contract():
    return json.loads(compat.CONTRACT_FILE.read_text())


@pytest.fixture(autouse=True)
def no_allowance(monkeypatch):
    monkeypatch.delenv(ALLOW_UNTESTED_ENV, raising=False)


# --- the installed SGLang ---


def test_the_installed_sglang_keeps_the_contract(contract):
    assert compat.find_breaches(contract) == ([], [])


def test_the_contract_holds_all_that_is_listed(contract):
    assert contract["sglang"] == SUPPORTED_SGLANG == compat.installed_version()
    assert list(contract["signatures"]) == list(compat.SIGNATURES)
    assert list(contract["behaviour"]) == list(compat.BEHAVIOUR)
    assert None not in contract["signatures"].values()


def test_a_fingerprint_is_the_same_whatever_pythons_version():
    source = "class A(B):\n    @c\n    def f(self, x=None, *, y: int) -> str:\n        return f'{x!r} {y}'"
    old, new = ast.parse(source), ast.parse(source)
    # Since Python 3.12 classes and functions have type parameters.
    later = {kind: type(kind.__name__, (kind,), {"_fields": (*kind._fields, "type_params")})
             for kind in (ast.ClassDef, ast.FunctionDef)}  # fmt: skip
    for node in ast.walk(new):
        if type(node) in later:
            node.type_params = []
            node.__class__ = later[type(node)]
    assert compat.outline(old) == compat.outline(new)
    assert "type_params" not in compat.outline(old) and "name='f'" in compat.outline(old)
    assert compat.outline(old) != compat.outline(ast.parse(source.replace("int", "str")))


def test_every_predicate_of_the_enum_is_answered():
    assert compat._interface_gaps() == []


def test_every_hook_of_a_scheduler_has_a_target_in_sglang():
    from pkgutil import resolve_name

    found = [*hooks.EVERYWHERE, *hooks.scheduler_hooks(SparseSpecConfig(), "cpu")]
    assert all(callable(resolve_name(hook.target)) for hook in found)
    assert all(hook.reason for hook in found)
    assert len({hook.target for hook in found}) == len(found)


# --- a contract that is not kept ---


def test_a_changed_signature_is_a_breach(contract):
    broken = copy.deepcopy(contract)
    name = compat.SIGNATURES[0]
    broken["signatures"][name].append("extra")
    breaches, suspicions = compat.find_breaches(broken)
    assert len(breaches) == 1
    assert f"sglang.srt.{name} takes" in breaches[0]
    assert "'extra'" in breaches[0]
    assert suspicions == []


@pytest.mark.parametrize("part", ["signatures", "behaviour"])
def test_what_is_gone_is_a_breach(contract, part):
    broken = copy.deepcopy(contract)
    broken[part]["managers.scheduler.Scheduler.no_such_method"] = ["self"]
    breaches, _ = compat.find_breaches(broken)
    assert len(breaches) == 1
    assert "sglang.srt.managers.scheduler.Scheduler.no_such_method" in breaches[0]


def test_changed_code_is_a_suspicion_and_strict_makes_it_an_error(contract, tmp_path, monkeypatch, caplog):
    broken = copy.deepcopy(contract)
    name = compat.BEHAVIOUR[0]
    broken["behaviour"][name] = "0" * 16
    assert compat.find_breaches(broken) == ([], [f"sglang.srt.{name} was changed"])
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(broken))
    monkeypatch.setattr(compat, "CONTRACT_FILE", path)
    compat.check_contract()
    assert f"sglang.srt.{name} was changed" in caplog.text
    with pytest.raises(compat.ContractError, match=f"{name} was changed"):
        compat.check_contract(strict=True)


def test_a_missing_field_is_a_breach(contract, monkeypatch):
    monkeypatch.setitem(compat.FIELDS, "managers.utils.GenerationBatchResult", "accept_lens no_such_field")
    breaches, _ = compat.find_breaches(contract)
    assert breaches == ["sglang.srt.managers.utils.GenerationBatchResult lacks no_such_field"]


def test_another_version_is_refused_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "9.9.9")
    with pytest.raises(compat.ContractError) as caught:
        compat.check_contract()
    for part in [f"made for sglang {SUPPORTED_SGLANG}", "sglang 9.9.9 is installed", *WAYS_OUT]:
        assert part in str(caught.value)


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("0", False), ("", False)])
def test_an_untested_version_can_be_allowed(monkeypatch, value, allowed):
    monkeypatch.setattr(compat, "installed_version", lambda: "9.9.9")
    monkeypatch.setenv(ALLOW_UNTESTED_ENV, value)
    if allowed:
        compat.check_version()
    else:
        with pytest.raises(compat.ContractError):
            compat.check_version()


# --- a mutated SGLang ---

# File, what is replaced (it stands there once), by what.
MUTATIONS = [
    (
        "srt/mem_cache/kv_index_translator.py",
        "def bind_own_plan(self, forward_batch)",
        "def bind_own_plan(self, batch)",
    ),
    ("srt/managers/utils.py", "\n    accept_lens: ", "\n    accepted_lens: "),
    (
        "srt/mem_cache/allocation_sizing.py",
        "return 2 * get_alloc_len_per_decode()",
        "return 3 * get_alloc_len_per_decode()",
    ),
    (
        "srt/speculative/spec_info.py",
        "\n    def is_none(self)",
        "\n    def is_brand_new(self):\n        return False\n\n    def is_none(self)",
    ),
]
TOLD = [
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan takes ['self', 'batch']",
    "sglang.srt.managers.utils.GenerationBatchResult lacks accept_lens",
    "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode was changed",
    "SparseSpecAlgorithm lacks is_brand_new()",
]


def shadow(source, target, replaced):
    """A tree of links to `source`: real folders along the way to the files that `replaced` maps to a text."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        below = {
            path.relative_to(entry.name): text
            for path, text in replaced.items()
            if path.parts[0] == entry.name
        }
        if not below:
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shadow(entry, target / entry.name, below)
        else:
            (target / entry.name).write_text(next(iter(below.values())))


def test_a_mutated_sglang_is_refused_with_all_that_is_wrong(tmp_path):
    replaced = {}
    for name, old, new in MUTATIONS:
        source = (SGLANG / name).read_text()
        assert source.count(old) == 1
        replaced[Path(name)] = source.replace(old, new)
    shadow(SGLANG, tmp_path / "sglang", replaced)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "sglang_sparsespec.compat"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "ContractError: " in last
    for part in [*TOLD, *WAYS_OUT]:
        assert part in last
    assert last.count("sglang.srt.") == 3  # nothing else is accused


# --- hooks ---


@pytest.fixture
def target(monkeypatch, hook_registry):
    """A module of our own in SGLang's place."""
    module = ModuleType("sparsespec_hook_target")
    module.size = lambda: 3
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def hook_on(name, function=None, kind=HookType.AFTER):
    function = function or (lambda result: result + 1)
    return hooks.Hook(f"sparsespec_hook_target.{name}", kind, function, "the reason")


@pytest.mark.parametrize(
    ("kind", "function", "value"),
    [
        (HookType.AFTER, lambda result: result + 1, 4),
        (HookType.REPLACE, lambda: 10, 10),
        (HookType.AROUND, lambda original: original() * 2, 6),
    ],
)
def test_an_installed_hook_is_in_effect(target, kind, function, value):
    hooks.install([hook_on("size", function, kind)])
    assert target.size() == value


def test_two_hooks_on_one_target_are_both_in_effect(target):
    hooks.install([hook_on("size"), hook_on("size", lambda result: result * 10)])
    assert target.size() == 40


def test_a_hook_that_was_not_applied_raises(target):
    hook = hook_on("size")
    hooks.register([hook])
    with pytest.raises(hooks.HookError) as caught:
        hooks.verify([hook])
    assert "sparsespec_hook_target.size (the reason): SGLang did not apply the hook" in str(caught.value)
    assert "start without --speculative-algorithm SPARSESPEC" in str(caught.value)


def test_a_target_that_is_not_there_raises(target):
    with pytest.raises(hooks.HookError, match=r"hook_target\.gone \(the reason\): SGLang did not apply"):
        hooks.install([hook_on("gone")])


def test_a_hook_that_was_overwritten_raises(target):
    hook = hook_on("size")
    hooks.install([hook])
    target.size = lambda: 3
    with pytest.raises(hooks.HookError, match=r"hook_target\.size \(the reason\): something replaced"):
        hooks.verify([hook])


def test_a_target_that_was_removed_afterwards_raises(target):
    hook = hook_on("size")
    hooks.install([hook])
    del target.size
    with pytest.raises(hooks.HookError, match=r"hook_target\.size \(the reason\): something replaced"):
        hooks.verify([hook])


def test_a_hook_that_comes_too_late_raises(target):
    """SGLang patches a target once; what is registered after that is ignored there, and must not be here."""
    hooks.install([hook_on("size")])
    with pytest.raises(hooks.HookError, match="something replaced"):
        hooks.install([hook_on("size", lambda result: result * 10)])


def test_a_wrapper_around_ours_leaves_it_in_effect(target):
    import functools

    hook = hook_on("size")
    hooks.install([hook])
    ours = target.size
    target.size = functools.wraps(ours)(lambda: ours())
    hooks.verify([hook])


# --- the package itself ---

SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_nothing_is_checked_by_assert(path):
    """`python -O` strips asserts, and some users run with it."""
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert found == []
