"""Kernels of sglang-sparsespec. Importing this package imports neither torch nor Triton.

    from sgl_kernel_ext.score import score_keys    # how much attention each key of a verify row got
    from sgl_kernel_ext.select import select       # the keys that got most, all layers in one launch
    from sgl_kernel_ext import reference           # the same, slow and obvious, in torch

Functions are not re-exported here: `select` the function would hide `select` the module.
"""

__version__ = "0.1.0"
