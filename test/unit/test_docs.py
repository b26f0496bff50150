"""The documentation says what the code does: configuration, refusals, metrics, links and make targets."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_sparsespec import config, metrics, refusals, version
from sglang_sparsespec.memory.offload import Offload
from sglang_sparsespec.memory.report import MemoryReport
from sglang_sparsespec.worker import SparseSpecWorker

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def table_rows(text):
    """Cells of every table row, without the header's rule."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("-: ")]


def first_cells(text):
    return {re.sub(r"^`([^`]*)`$", r"\1", row[0]) for row in table_rows(text)}


def number(value):
    return str(int(value)) if value == int(value) else str(value)


def allowed(rules):
    if "choices" in rules:
        return ", ".join(f"`{choice}`" for choice in rules["choices"])
    above = "above " if rules.get("exclusive_low") else ""
    return f"{above}{number(rules['low'])} to {number(rules['high'])}"


# --- configuration ---


def test_the_table_holds_every_key_with_its_type_default_and_range():
    section = read("configuration.md").split("\n## Keys\n")[1].split("\n### ")[0]
    kinds = {int: "integer", float: "number", str: "string"}
    wanted = [
        [f"`{spec.name}`", kinds[type(spec.default)], f"`{json.dumps(spec.default)}`", allowed(spec.metadata)]
        for spec in dataclasses.fields(config.SparseSpecConfig)
    ]
    header, *rows = table_rows(section)
    assert header == ["Key", "Type", "Default", "Allowed", "Meaning"]
    assert [row[:4] for row in rows] == wanted
    assert all(row[4] for row in rows)


def test_every_environment_variable_is_told():
    told = first_cells(read("configuration.md"))
    assert set(config.KNOWN_ENV) <= told
    everywhere = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(rf"{config.ENV_PREFIX}[A-Z_]+\b", everywhere)) <= {
        *config.KNOWN_ENV,
        config.ENV_PREFIX,
    }


def test_examples_of_configurations_are_valid():
    found = []
    for page in PAGES:
        found += re.findall(r"--sparsespec-config '(\{.*?\})'", page.read_text(encoding="utf-8"))
    assert len(found) >= 2
    for text in found:
        config.SparseSpecConfig.from_mapping(config.parse_config_text(text))


def test_the_readme_shows_the_defaults():
    section = (ROOT / "README.md").read_text().split("\n## Configuration in short\n")[1].split("\n## ")[0]
    defaults = config.SparseSpecConfig().asdict()
    shown = {row[0].strip("`"): row[1].strip("`") for row in table_rows(section)[1:]}
    assert shown
    assert shown == {key: str(defaults[key]) for key in shown}


# --- refusals ---


@pytest.mark.parametrize(
    ("heading", "refused"),
    [
        ("### Refused with HTTP 400", refusals.REQUEST_REFUSALS),
        ("### Refused at start-up", refusals.SERVER_REFUSALS),
    ],
)
def test_the_support_matrix_holds_every_refusal_and_no_other(heading, refused):
    section = read("support-matrix.md").split(f"\n{heading}\n")[1].split("\n## ")[0]
    assert [(row[0], row[1]) for row in table_rows(section)[1:]] == [
        (f"`{refusal.name}`", refusal.reason) for refusal in refused
    ]


def test_the_memory_page_holds_every_flag_that_offload_cannot_be_used_with():
    section = read("memory.md").split("leave it no host tier:")[1]
    assert [(row[0], row[1]) for row in table_rows(section)[1:]] == [
        (f"`{refusal.name}`", refusal.reason) for refusal in refusals.OFFLOAD_REFUSALS
    ]


# --- metrics ---


def test_every_field_of_server_info_is_told():
    worker = SparseSpecWorker.__new__(SparseSpecWorker)
    worker.config = config.SparseSpecConfig()
    worker.attention_name, worker.state_bytes, worker.graph_batch_sizes = "torch", 1, []
    worker.rounds, worker.draft_weights = SimpleNamespace(eager_micro_steps=0), None
    worker.learner, worker.device_planned, worker.memory = None, False, None
    worker.timer = metrics.PhaseTimer("cpu")
    worker.metrics = metrics.AcceptanceMetrics(2)
    told = table_rows(read("metrics.md").split("\n## The server")[1].split("\n## ")[0])[1:]
    assert {row[0].strip("`") for row in told} == set(worker.describe())


def test_every_field_of_the_kv_pool_and_of_memory_is_told():
    told = table_rows(read("metrics.md").split("\n## The KV pool\n")[1].split("\n## ")[0])[1:]
    assert [row[0].strip("`") for row in told] == list(Offload(config.SparseSpecConfig()).describe(0, 0))
    row = next(line for line in read("metrics.md").splitlines() if line.startswith("| `memory` |"))
    report = MemoryReport(*range(9))
    assert set(re.findall(r"`(\w+)`", row)) == {"memory", *report.asdict()}


PROMETHEUS = """
from sglang_sparsespec.metrics import AcceptanceMetrics
from prometheus_client import REGISTRY

metrics = AcceptanceMetrics(2)
metrics.enable_prometheus({"model_name": "m"})
metrics.launched([2], [10])
metrics.finished([1])
metrics.chose(2, "fixed")
metrics.eager(3)
samples = [s for m in REGISTRY.collect() if m.name.startswith("sparsespec") for s in m.samples]
for sample in samples:
    if not sample.name.endswith("_created"):
        print(sample.name, *(label for label in sample.labels if label != "model_name"))
"""


def test_every_prometheus_name_and_label_is_told():
    # In a process of its own: the registry refuses a second registration.
    done = subprocess.run([sys.executable, "-c", PROMETHEUS], capture_output=True, text=True, check=True)
    exported = {tuple(line.split()) for line in done.stdout.splitlines()}
    told = table_rows(read("metrics.md").split("\nOurs:\n")[1])[1:]
    found = {tuple(re.findall(r"`(\w+)`", " ".join(row[:2]))) for row in told}
    assert found == exported


# --- the rest ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_internal_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert ROOT in file.parents, target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_the_readme_links_every_page():
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


def test_make_targets_that_are_told_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    told = {
        name
        for page in PAGES
        for name in re.findall(r"\bmake ([a-z][a-z-]+)\b(?=[`\n ]*[`\n])", page.read_text())
    }
    assert {"demo", "test", "venv"} <= told
    for name in told:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name


def test_files_that_are_named_exist():
    package = ROOT / "python" / "sglang_sparsespec"
    for name in ("how-it-works.md", "development.md"):
        for path in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|json|toml)|(?:[\w-]+/)+)`", read(name)):
            assert any((base / path).exists() for base in (ROOT, package, ROOT / "test" / "unit")), path


def test_versions_are_those_of_the_package():
    assert f"## [{version.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for page in PAGES:
        named = set(re.findall(r"\b0\.5\.\d+\b", page.read_text(encoding="utf-8")))
        assert named <= {version.SUPPORTED_SGLANG}, page.name
