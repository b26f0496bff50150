"""Time of a launch, from CUDA graphs of ten launches on other data each; and the card's bandwidth."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch

LAUNCHES, REPLAYS = 10, 20
BANDWIDTH_BYTES = 4 << 30


def time_us(launch: Callable[[int], object], device: torch.device) -> float:
    """Median microseconds of one `launch(i)`, i = 0..9 in turn, over 20 replays of a graph of ten.

    `launch` gets the number of the launch, to take other data each time: what it reads must not be in L2. It
    is called twice before the capture.
    On a CPU, where the figure means nothing: the mean of three calls.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for i in range(3):
            launch(i)
        return (time.perf_counter() - began) / 3 * 1e6
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for i in range(2):
            launch(i)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i)
    return replay_us(graph.replay) / LAUNCHES


def replay_us(replay: Callable[[], object]) -> float:
    """Median microseconds of 20 calls on the current stream, by CUDA events, after two to warm up."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for _ in range(2):
        replay()
    for begin, end in events:
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of the card: `copy` (read and written bytes) and `read`, the best of the ways tried.

    On a CPU both are 1e9, so that the script can be tried.
    """
    if device.type != "cuda":
        return {"copy": 1e9, "read": 1e9}
    source = torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)
    half = source[: len(source) // 2]
    target = torch.empty_like(half)
    copied = 2 * half.nbytes / (replay_us(lambda: target.copy_(half)) * 1e-6)
    found = {"copy": copied, "read_by_sum": source.nbytes / (replay_us(source.sum) * 1e-6)}
    with contextlib.suppress(ImportError):
        found["read_by_triton"] = source.nbytes / (_triton_read_us(source) * 1e-6)
    found["read"] = max(value for name, value in found.items() if name.startswith("read"))
    return found


def _triton_read_us(source: torch.Tensor) -> float:
    from read_kernel import PER_PROGRAM, read_kernel

    sums = torch.empty(len(source) // PER_PROGRAM, dtype=torch.float32, device=source.device)
    return replay_us(lambda: read_kernel[(len(sums),)](source, sums, num_warps=8))
