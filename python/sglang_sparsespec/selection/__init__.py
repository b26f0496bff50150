"""Selectors, by the name that the configuration uses."""

from __future__ import annotations

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.selection.interface import Selector


def make_selector(config: SparseSpecConfig, *, seed: int = 0) -> Selector:
    """The selector that `config.selector` names."""
    if config.selector == "pillar":
        from sglang_sparsespec.selection.pillar import PillarSelector

        return PillarSelector(config)
    if config.selector == "window":
        from sglang_sparsespec.selection.window import WindowSelector

        return WindowSelector(config)
    from sglang_sparsespec.selection.random import RandomSelector

    return RandomSelector(config, seed=seed)


__all__ = ["Selector", "make_selector"]
