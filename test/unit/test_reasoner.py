"""The reasoner's problems and its widening. The scripts are run, or imported, from where they stand."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REASONER = Path(__file__).parents[2] / "benchmark" / "reasoner"


@pytest.fixture
def synth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REASONER))
    import synth

    return synth


def documents(synth: ModuleType, seed: int, length: int = 900) -> list[dict]:
    maker = synth.DocMaker(seed)
    return [doc for family in synth.FAMS if (doc := maker.doc(length, family))]


def test_problems_follow_from_the_seed(synth: ModuleType) -> None:
    assert documents(synth, 11) == documents(synth, 11)
    assert documents(synth, 11) != documents(synth, 12)


def test_every_family_has_problems_that_fit(synth: ModuleType) -> None:
    docs = documents(synth, 5)
    assert [doc["fam"] for doc in docs] == synth.FAMS
    assert all(len(doc["p"]) + len(doc["c"]) <= 900 for doc in docs)


def test_tokens_give_the_text_back_and_end_with_the_answer(synth: ModuleType) -> None:
    for doc in documents(synth, 5):
        assert synth.decode(doc["p"]) == synth.render_prompt(doc["prompt"])
        assert synth.decode(doc["c"]).endswith(f"</think>\nAnswer: {doc['answer']}<|im_end|>")


def test_answers_are_right_by_an_independent_computation(synth: ModuleType) -> None:
    maker = synth.DocMaker(3)
    for _ in range(5):
        added, sorted_ = maker.doc(900, "addl"), maker.doc(900, "bucket")
        items = [int(x) for x in re.findall(r"item \d+ = (\d+)", added["prompt"])]
        assert int(added["answer"]) == sum(items)
        items = sorted(int(x) for x in re.findall(r"item \d+ = (\d+)", sorted_["prompt"]))
        rank = int(re.search(r"sorted number (\d+)", sorted_["prompt"])[1])
        assert int(sorted_["answer"]) == items[rank - 1]


def test_paths_of_bfs_are_paths_of_the_graph(synth: ModuleType) -> None:
    doc = synth.DocMaker(8).doc(900, "bfs")
    edges = {m[1]: m[2].split() for m in re.finditer(r"node (\w+) to ([\w ]+)", doc["prompt"])}
    start, goal = re.search(r"start (\w+) goal (\w+)", doc["prompt"]).groups()
    path = doc["answer"].split()
    assert (path[0], path[-1]) == (start, goal)
    assert all(b in edges[a] for a, b in itertools.pairwise(path))


def test_an_unknown_family_is_refused(synth: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"unknown families \['sudoku'\]"):
        synth.DocMaker(1, ["sudoku"])


def run_script(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, str(REASONER / name), *args]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300)


def test_a_widened_model_computes_the_same_function() -> None:
    done = run_script("widen.py", "--selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verify torch.float32") == 3


def test_widening_nothing_is_refused() -> None:
    done = run_script("widen.py", "--shape", "8b")
    assert done.returncode == 2
    assert "--src and --dst are needed" in done.stderr


def test_check_names_the_bad_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "p", "answer": "1", "family": "prog"}\n{"prompt": "p"}\n')
    done = run_script("check.py", "--prompts", str(prompts))
    assert done.returncode == 2
    assert "line 2: no answer, family" in done.stderr
