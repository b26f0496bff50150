"""Shared by all tests. Nothing heavy is imported here: server tests collect through it too."""

import pytest


def pytest_configure(config):
    """Refuse to run where `assert` does nothing: every test would pass.

    Under `python -O` the asserts of test modules and conftests still run, as pytest rewrites them to `raise`;
    `--assert=plain` takes that away. Checks in a plain helper module are stripped: raise there instead.
    """
    try:
        assert config is None
    except AssertionError:
        return
    raise pytest.UsageError("asserts are stripped here: drop --assert=plain, or run without python -O.")


@pytest.fixture(scope="module")
def one_thread():
    """Many small tensors: a team of threads would only wait for each other, badly so on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hook_registry(monkeypatch):
    """SGLang's hook registry, empty; what was registered before is back afterwards."""
    from collections import defaultdict

    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return HookRegistry
