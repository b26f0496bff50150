"""What storms and soaks send, and what they look at."""

import os
import time
from pathlib import Path

from sglang_sparsespec.demo import find_device

# Rounds planned on the device: in CUDA graphs where there is a GPU.
DEVICE_PLANNED = "auto" if find_device() == "cuda" else "torch_paged"


def params_of(rng):
    """Random sampling parameters, most of them good ones."""
    some = {
        "temperature": [0, 0, 0.3, 1.0, 2.0],
        "top_p": [1.0, 0.9, 0.2],
        "top_k": [-1, 1, 3, 50],
        "min_p": [0.0, 0.1],
        "frequency_penalty": [0.0, 1.5, -0.5],
        "presence_penalty": [0.0, 1.0],
        "repetition_penalty": [1.0, 1.4],
        "sampling_seed": [None, 1, -7],
        "logit_bias": [None, {"11": 3.0}, {"30": -100.0}],
        "stop": [None, ["\n"], [" 1", "so"]],
        "stop_token_ids": [None, [11]],
        "regex": [None, None, None, "(ab|cd)+x"],
        "n": [1, 1, 1, 2],
        "ignore_eos": [False, True],
    }
    chosen = {name: rng.choice(values) for name, values in some.items() if rng.random() < 0.3}
    return {"max_new_tokens": rng.choice([1, 2, 9, 30]), **chosen}


def wait_for_its_end(server):
    """Raises AssertionError where processes are left. SGLang may wait a minute before it ends, for
    dumps of those that died."""
    for _ in range(100):
        if not processes_of(server):
            return
        time.sleep(1)
    raise AssertionError(f"still there: {processes_of(server)}")


def processes_of(server):
    """Process ids of the server's group, by name."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if os.getpgid(int(entry)) == server.pid:
                    title = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if title:  # not a zombie
                        found[int(entry)] = title
            except OSError:
                continue
    return found
