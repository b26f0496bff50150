"""Random positions: the control that shows that a selection can cost acceptance only, never correctness."""

from __future__ import annotations

import torch

from sglang_sparsespec.config import SparseSpecConfig
from sglang_sparsespec.selection.interface import Selector


class RandomSelector(Selector):
    """Ranks by a random number drawn anew at every verification, from a generator of its own."""

    def __init__(self, config: SparseSpecConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self._seed = seed
        self._generator: torch.Generator | None = None

    def rank(self, scores: torch.Tensor | None, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(device=prefix_lens.device).manual_seed(self._seed)
        return torch.rand((len(prefix_lens), 1, width), generator=self._generator, device=prefix_lens.device)
