"""Without a CUDA device Triton's interpreter runs the kernels: that must be said before the first import."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def device() -> torch.device:
    """The CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dtype(device) -> torch.dtype:
    """fp32 on the CPU; bf16 on a GPU, where exact fp32 products compile and run slowly."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
