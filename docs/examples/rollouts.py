"""Rollouts between updates of the weights, as a trainer in the same process makes them.

python rollouts.py MODEL UPDATED_MODEL [DTYPE]

UPDATED_MODEL stands for what the trainer has made of MODEL: a folder with safetensors of the same names.
"""

import sys
from pathlib import Path

import sglang as sgl
from safetensors.torch import load_file

PROMPTS = ["x = 17 + 25 ;", "Count from 1 to 20."]
SAMPLING = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 40}


def tensors_of(model: str) -> list:
    files = sorted(Path(model).glob("*.safetensors"))
    return [pair for file in files for pair in load_file(file).items()]


def roll_out(engine: sgl.Engine, name: str) -> None:
    for answer in engine.generate(PROMPTS, SAMPLING, return_logprob=True):
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        print(f"{name}: mean log-probability {sum(logprobs) / len(logprobs):.3f}: {answer['text']!r}")


def update(engine: sgl.Engine, tensors: list) -> None:
    """What is served now forgets its KV cache and its selections."""
    engine.begin_weight_update()
    engine.update_weights_from_tensor(tensors)
    engine.end_weight_update()


def main(model: str, updated: str, dtype: str = "auto") -> None:
    with sgl.Engine(model_path=model, speculative_algorithm="SPARSESPEC", dtype=dtype) as engine:
        roll_out(engine, "old")
        update(engine, tensors_of(updated))
        roll_out(engine, "new")
        engine.update_weights_from_disk(updated)  # the same, by the file system
        roll_out(engine, "new")
        update(engine, tensors_of(model))
        roll_out(engine, "old")


if __name__ == "__main__":  # the engine's processes import this file again
    main(*sys.argv[1:])
