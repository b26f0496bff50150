"""Lossless sparse self-speculative decoding for reasoning models, inside SGLang."""

from sglang_sparsespec.version import __version__

__all__ = ["__version__"]
