"""The doctor's verdicts on configurations that a server here would refuse, and on others."""

import json

import pytest
import torch
from sglang_sparsespec import doctor
from sglang_sparsespec.config import CONFIG_ENV

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused depends on the GPU")


def failures(monkeypatch, **config):
    monkeypatch.setenv(CONFIG_ENV, json.dumps(config))
    return [text for status, text in doctor.check_attention() if status == "fail"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"attention": "fused"}, 'attention "fused" serves nothing here'),
        ({"attention": "flashinfer"}, 'attention "flashinfer" serves nothing here'),
        ({"draft_weights": "fp8"}, 'draft_weights "fp8" needs a GPU'),
        ({"draft_weights": "int4+fp8"}, 'draft_weights "int4+fp8" needs a GPU'),
    ],
)
def test_what_no_server_could_serve_here_is_a_failure(monkeypatch, config, told):
    found = failures(monkeypatch, **config)
    assert len(found) == 1 and found[0].startswith(told)


@pytest.mark.parametrize("config", [{}, {"attention": "torch_paged"}, {"draft_weights": "int4"}])
def test_what_would_be_served_is_not(monkeypatch, config):
    assert failures(monkeypatch, **config) == []


def test_a_failure_is_in_the_exit_status(monkeypatch, capsys):
    monkeypatch.setenv(CONFIG_ENV, '{"attention": "fused"}')
    assert doctor.main([]) == 1
    assert "All is well" not in capsys.readouterr().out
