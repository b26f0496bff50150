"""The JSON file of a sweep: one entry a run, written anew after every cell, so that no figure is lost."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FORMAT = 1
PACKAGES = (
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "torch",
    "triton",
    "sglang-sparsespec",
    "sgl-kernel-ext",
)


class ResultsError(ValueError):
    """A results file that cannot be read or added to."""


def versions() -> dict[str, str]:
    """Installed versions of what matters for speed; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """GPUs (name, driver, memory) by nvidia-smi, the CPU and its cores. Makes no CUDA context."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        gpus = [line.strip() for line in out.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        gpus = []
    cpu = platform.processor() or platform.machine()
    return {"gpus": gpus, "cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def header() -> dict[str, Any]:
    """What every run says of itself: command, start, machine and versions."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def read(path: Path) -> dict[str, Any]:
    """The content of a results file. Raises ResultsError when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"cannot read the results file {str(path)!r}: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("runs"), list):
        raise ResultsError(f"{str(path)!r} is no results file of format {FORMAT}; name another one.")
    return data


class ResultFile:
    """A new run at the end of a results file; an existing file keeps its runs.

    Raises:
        ResultsError: the file exists and is no results file.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self._path = path
        self._data = read(path) if path.exists() else {"format": FORMAT, "runs": []}
        self.run = {**run, "servers": {}, "cells": [], "prompt_runs": [], "swings": []}
        self._data["runs"].append(self.run)
        self.save()

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Append to `cells`, `prompt_runs` or `swings` and write the file."""
        self.run[kind].append(entry)
        self.save()

    def save(self) -> None:
        """Write the whole file beside its place, then move it there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(self._path.name + ".tmp")
        draft.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._path)
