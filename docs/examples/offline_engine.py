"""No server: an engine in this process. Settings of SPARSESPEC go into the environment.

python offline_engine.py MODEL [DTYPE]
"""

import json
import os
import sys

import sglang as sgl


def main(model: str, dtype: str = "auto") -> None:
    os.environ.setdefault("SGLANG_SPARSESPEC_CONFIG", json.dumps({"stride": 6}))
    with sgl.Engine(model_path=model, speculative_algorithm="SPARSESPEC", dtype=dtype) as engine:
        prompts = ["Count from 1 to 20.", "x = 17 + 25 ;"]
        for answer in engine.generate(prompts, {"temperature": 0, "max_new_tokens": 40}):
            told = answer["meta_info"]
            counts = f"{told['completion_tokens']} tokens, {told['spec_verify_ct']} verifications"
            print(f"{counts}: {answer['text']!r}")


if __name__ == "__main__":  # the engine's processes import this file again
    main(*sys.argv[1:])
