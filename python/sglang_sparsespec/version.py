"""The package's version and the one SGLang release it is made for."""

__version__ = "0.1.0"
SUPPORTED_SGLANG = "0.5.23"
