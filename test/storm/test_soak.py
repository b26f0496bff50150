"""Twenty minutes of mixed load: no process of the server grows.

Not part of `make test`: `make test-storm` runs it; SOAK_MINUTES shortens or lengthens it.
"""

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from farm import REASONER, generate, make_server, wait_until_idle
from sglang_sparsespec._client import encode_prompts, load_problems
from storms import params_of, processes_of

pytestmark = [pytest.mark.server, pytest.mark.timeout(7200)]

MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
WARM_UP = 0.25  # share of the time after which caches and pools have their sizes
MOST_MB_A_MINUTE = 1.0
CONFIG = {
    "stride": 4,
    "min_tokens": 32,
    "attention": "torch_paged",
    "adapt": "on",
    "lookup": "on",
    "draft_weights": "int4",
}


def resident_mb(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(points):
    """Least squares, per minute, of [(seconds, value)]."""
    mean_t, mean_v = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    above = sum((t - mean_t) * (v - mean_v) for t, v in points)
    return 60 * above / sum((t - mean_t) ** 2 for t, _ in points)


def test_the_slope_of_a_line_is_its_own():
    assert slope([(t, 5 + t / 30) for t in range(0, 300, 7)]) == pytest.approx(2.0)


def test_no_process_grows(tmp_path):
    prompts = encode_prompts(load_problems(REASONER.parent / "demo-prompts.jsonl")[:8], str(REASONER))
    args = ("--max-total-tokens", "6000", "--enable-metrics")
    sizes, stop, ends = {}, threading.Event(), []

    def load(worker):
        rng = random.Random(worker)
        while not stop.is_set():
            params = {**params_of(rng), "max_new_tokens": rng.choice([5, 40, 150])}
            body = {"input_ids": rng.choice(prompts)[: rng.randrange(1, 200)], "sampling_params": params}
            reply = requests.post(f"{server.url}/generate", json=body, timeout=300)
            ends.append(reply.status_code)

    with make_server(REASONER, tmp_path / "soak.log", config=json.dumps(CONFIG), args=args) as server:
        before = generate(server, prompts[:1], max_new_tokens=50)[0]["output_ids"]
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(load, worker) for worker in range(8)]
            start = time.monotonic()
            while (now := time.monotonic() - start) < 60 * MINUTES and not any(r.done() for r in running):
                for pid, title in processes_of(server).items():
                    sizes.setdefault((pid, title.strip()[:60]), []).append((now, resident_mb(pid)))
                time.sleep(2)
            stop.set()
            for result in running:
                result.result(timeout=300)
        wait_until_idle(server)
        assert generate(server, prompts[:1], max_new_tokens=50)[0]["output_ids"] == before
    assert set(ends) <= {200, 400} and ends.count(200) > 100
    slopes = {}
    for (_, title), points in sizes.items():
        later = [point for point in points if point[0] > 60 * MINUTES * WARM_UP]
        if len(later) > 10:
            slopes[title] = slope(later)
            print(
                f"\n{title}: {points[0][1]:.0f} to {points[-1][1]:.0f} MB, {slopes[title]:+.2f} MB a minute"
            )
    assert len(slopes) >= 3
    assert max(slopes.values()) < MOST_MB_A_MINUTE, f"{len(ends)} requests"
