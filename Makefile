# Needs GNU make 4, bash and Python 3.11 or later. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
DEMO_FLAGS ?=
CACHE := $(or $(XDG_CACHE_HOME),$(or $(HOME),$(shell echo ~))/.cache)/sglang-sparsespec
HASH := $(shell sha256sum pyproject.toml | cut -c1-12)
# Outside the clone, so that a fresh clone with the same dependencies need not install 11 GB again.
VENV ?= $(CACHE)/venv-$(HASH)
PY := $(VENV)/bin/python
# Where several clones share an environment, each runs its own code, whichever was linked last.
export PYTHONPATH := $(CURDIR)/python:$(CURDIR)/sgl-kernel-ext$(if $(PYTHONPATH),:$(PYTHONPATH))
SOURCES := python test benchmark sgl-kernel-ext

.PHONY: help venv demo doctor test test-unit test-kernels test-optimized test-startup test-server \
  test-models test-storm test-kits test-gpu lint format bench-reasoner clean clean-venvs

help:
	@cat <<-'END'
	make demo            problems solved with and without SPARSESPEC, checked and compared
	make doctor          what is installed, what would be used, a short self-test
	make test            all checks: lint, unit, contract, kernels, optimized, server (what CI runs)
	make test-unit       unit and contract tests, no server
	make test-kernels    kernels of sgl-kernel-ext: in Triton's interpreter, or on a GPU where there is one
	make test-optimized  unit tests once more with PYTHONOPTIMIZE=1
	make test-startup    servers that end at start-up, with the reason
	make test-server     tests against real servers
	make test-models     a tiny model of every architecture, ids against plain decoding (20 minutes)
	make test-storm      what clients, weight updates and signals can do to a server (10 minutes)
	make test-kits       SGLang's own kits with a small language model from PyPI (half an hour)
	make test-gpu        kernels against the reference; skipped without a CUDA device
	make lint            ruff and mypy
	make format          rewrite the sources as lint wants them
	make bench-reasoner  how to train, widen and serve the reasoning model of the benchmarks
	make venv            only the environment: SGLang and tools, about 3 minutes and 11 GB, once
	make clean           remove caches and build output from this clone
	make clean-venvs     remove environments that were made for another pyproject.toml
	END
	echo
	echo 'VENV=$(VENV)'
	echo 'Others: PYTHON=$(PYTHON), PIP_FLAGS, PYTEST_FLAGS, DEMO_FLAGS.'

# Three files in the environment: .made-by-make (ours to rebuild), .complete (the installation came to its end),
# .clone (the clone that the editable install points at). An environment without the first is used as it is.
venv:
	@venv='$(VENV)' python='$(PYTHON)'
	fail() { printf 'make venv: %s\n' "$$@" >&2; exit 1; }
	if [ -e "$$venv" ] && [ ! -e "$$venv/.made-by-make" ]; then
	  [ -x "$$venv/bin/python" ] || fail "$$venv exists and is no environment. Remove it, or give another VENV=."
	  "$$venv/bin/python" -c 'import importlib.metadata as m; m.version("sglang"); m.version("sglang-sparsespec")' \
	    2>/dev/null || fail "$$venv was not made by make and lacks sglang or this package." \
	      "Run in it: pip install -e '.[dev]'    or give another VENV=."
	  exit 0
	fi
	complete() { [ -e "$$venv/.complete" ] && [ -x "$$venv/bin/python" ]; }
	current() { complete && [ "$$(cat "$$venv/.clone" 2>/dev/null)" = '$(CURDIR)' ]; }
	current && exit 0
	mkdir -p "$$(dirname "$$venv")" || fail "cannot write there. Give a place that you can write to: VENV=DIR."
	if command -v flock >/dev/null; then
	  exec 9>"$$venv.lock"
	  flock -n 9 || { echo "Another make prepares $$venv; waiting for it."; flock 9; }
	  current && exit 0
	fi
	install() { "$$venv/bin/python" -m pip --disable-pip-version-check install $(PIP_FLAGS) "$$@" </dev/null; }
	if complete; then
	  echo "Pointing $$venv at this clone."
	  rm -f "$$venv/.clone"
	  install --quiet --no-deps --no-build-isolation -e . -e ./sgl-kernel-ext 2>/dev/null \
	    || install --quiet --no-deps -e . -e ./sgl-kernel-ext \
	    || fail "the package could not be linked into $$venv. Remove that folder and start again."
	  echo '$(CURDIR)' > "$$venv/.clone"
	  exit 0
	fi
	command -v "$$python" >/dev/null || fail "$$python is not installed." \
	  "Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.12"
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || fail "$$python is $$("$$python" -V 2>&1), Python 3.11 or later is needed." \
	    "Name another one: make PYTHON=/path/to/python3.12"
	has_venv() { "$$python" -c 'import ensurepip, venv' 2>/dev/null; }
	if ! has_venv && [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ]; then
	  echo "Python's venv module is missing; installing the Debian package python3-venv."
	  export DEBIAN_FRONTEND=noninteractive
	  apt-get install -y python3-venv </dev/null \
	    || { apt-get update && apt-get install -y python3-venv; } </dev/null || true
	fi
	has_venv || fail "$$python has no venv module." \
	  "Install it (Debian, Ubuntu: apt-get install python3-venv), or name another Python: make PYTHON=..."
	free=$$(df -Pk "$$(dirname "$$venv")" | awk 'NR == 2 { print int($$4 / 1048576) }')
	[ "$$free" -ge 12 ] || echo "Only $$free GB are free there; about 11 GB are needed. VENV=DIR takes another place."
	echo "Making $$venv: SGLang, PyTorch and tools, about 3 minutes and 11 GB. Later runs and clones reuse it."
	for old in '$(CACHE)'/venv-*/; do
	  [ -d "$$old" ] && [ "$${old%/}" != "$$venv" ] && echo "An older one is $$old ('make clean-venvs' removes it)."
	done || true
	mkdir -p "$$venv"
	touch "$$venv/.made-by-make"
	find "$$venv" -mindepth 1 -maxdepth 1 ! -name .made-by-make -exec rm -rf {} +
	"$$python" -m venv "$$venv" || fail "the environment could not be made in $$venv."
	started=$$SECONDS
	install -e '.[dev]' -e ./sgl-kernel-ext || fail \
	  "the installation failed; the reason stands above. What was started is made anew the next time." \
	  "It downloads from a Python package index. Where there is no network, give a folder of wheels:" \
	  "  make venv PIP_FLAGS='--no-index --find-links=DIR'" \
	  "or an environment that holds SGLang and this package already:  make VENV=DIR ..."
	echo '$(CURDIR)' > "$$venv/.clone"
	touch "$$venv/.complete"
	echo "Made $$venv in $$((SECONDS - started)) s."

demo: venv
	@'$(PY)' -m sglang_sparsespec.demo $(DEMO_FLAGS)

doctor: venv
	@'$(PY)' -m sglang_sparsespec.doctor

# Cheapest first, whatever -j says. Those without servers use a core each, so two run at a time.
test: venv
	@$(MAKE) lint
	$(MAKE) -j2 --output-sync=target test-unit test-kernels test-optimized test-startup
	$(MAKE) test-server

test-unit: venv
	@'$(PY)' -m pytest test/unit test/contract $(PYTEST_FLAGS)

test-kernels: venv
	@'$(PY)' -m pytest -c sgl-kernel-ext/pyproject.toml sgl-kernel-ext/tests sgl-kernel-ext/csrc/test $(PYTEST_FLAGS)

# Without the longest files: what they test is not checks that could have been asserts.
SLOW := reasoner benchmarks figures device_rounds triton_paged
test-optimized: venv
	@PYTHONOPTIMIZE=1 '$(PY)' -m pytest test/unit $(SLOW:%=--ignore=test/unit/test_%.py) $(PYTEST_FLAGS)

# Servers that end at once, for a reason.
test-startup: venv
	@'$(PY)' -m pytest test/server/test_startup.py $(PYTEST_FLAGS)

test-server: venv
	@'$(PY)' -m pytest test/server --ignore=test/server/test_startup.py $(PYTEST_FLAGS)

test-models: venv
	@'$(PY)' -m pytest test/models $(PYTEST_FLAGS)

test-storm: venv
	@'$(PY)' -m pytest test/storm -s $(PYTEST_FLAGS)

test-kits: venv
	@'$(PY)' -m pip --disable-pip-version-check install $(PIP_FLAGS) --quiet gguf accelerate
	'$(PY)' -m pytest test/kits -s $(PYTEST_FLAGS)

test-gpu: venv
	@'$(PY)' -m pytest test/gpu $(PYTEST_FLAGS)
	$(MAKE) test-kernels

lint: venv
	@'$(PY)' -m ruff check $(SOURCES)
	'$(PY)' -m ruff format --check $(SOURCES)
	'$(PY)' -m mypy

format: venv
	@'$(PY)' -m ruff check --fix $(SOURCES)
	'$(PY)' -m ruff format $(SOURCES)

bench-reasoner:
	@cat <<-'END'
	The reasoner is a small model with long, checkable chains of thought; benchmark/reasoner/README.md says more.
	Run these in benchmark/reasoner with the environment's Python ($(PY)).
	# 30M parameters, on one GPU; then the size of an 8B model, 16.4 GB; then a server, and its answers checked
	python train.py --out runs/r30m --minutes 7
	python widen.py --src runs/r30m --dst runs/r30m-8b --shape 8b
	python -m sglang.launch_server --model-path runs/r30m-8b --speculative-algorithm SPARSESPEC
	python check.py --url http://127.0.0.1:30000 --prompts prompts-2k.jsonl --json result.json
	END

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache python/*.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venvs:
	@for old in '$(CACHE)'/venv-*/; do
	  old=$${old%/}
	  [ -d "$$old" ] && [ "$$old" != '$(VENV)' ] || continue
	  echo "Removing $$old ($$(du -sh "$$old" | cut -f1))."
	  rm -rf "$$old" "$$old.lock"
	done
