"""Times the score and select kernels over their launch tunables on one GPU; checks each setting first.

    PYTHONPATH=sgl-kernel-ext python sgl-kernel-ext/tests/sweep.py [--only score|select]

Score times are for one layer, select times for 36 layers in one launch. L2 is flushed before each launch;
times are medians of 20 CUDA-graph replays between CUDA events. Several processes compile and check first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import time

import torch
from batches import make_batch
from sgl_kernel_ext import reference
from sgl_kernel_ext.score import score_keys
from sgl_kernel_ext.select import select

READ_BYTES_PER_S = 4.2e12
HQ, HKV, D, Q, LAYERS, FIXED_ONE = 32, 8, 128, 9, 36, 2**24
SCORE_SHAPES = [(48, 8192), (24, 16384), (48, 16384), (5, 8192)]
SELECT_SHAPES = [(48, 8192), (48, 16384)]
SCORE_SETTINGS = [
    {"order": o, "block_n": n, "chunk": c, "num_warps": w, "num_stages": s, "programs_per_sm": p}
    for o, n, c, w, s, p in [
        ("heads_inner", 128, None, 8, 7, 1),
        ("heads_inner", 128, None, 8, 5, 1),
        ("heads_inner", 128, None, 4, 7, 1),
        ("heads_inner", 256, None, 8, 3, 1),
        ("heads_inner", 64, None, 4, 5, 2),
        ("heads_inner", 64, None, 8, 7, 1),
        ("heads_inner", 32, None, 4, 7, 2),
        ("keys_inner", 128, 2048, 8, 7, 1),
        ("keys_inner", 128, 2048, 4, 5, 1),
        ("keys_inner", 64, 2048, 4, 5, 2),
        ("keys_inner", 64, 2048, 4, 9, 2),
        ("keys_inner", 64, 1024, 4, 7, 2),
    ]
]
SELECT_SETTINGS = [
    {"tile": t, "long_tile": long, "num_warps": w, "clear": clear}
    for t, long, w, clear in [
        (16384, 4096, 16, False),
        (16384, 8192, 32, False),
        (32768, 8192, 32, False),
        (8192, 8192, 16, False),
        (4096, 4096, 8, False),
        (1024, 4096, 16, False),
        (16384, 4096, 16, True),
        (16384, 8192, 32, True),
    ]
]
BUDGET = {"ratio_ppm": 50_000, "min_tokens": 256, "sink": 4, "recent": 0}


def score_case():
    """A small ragged batch, its LSE and the keys expected."""
    b = make_batch([1500, 700, 33, 0, 2200], [Q, 5, 0, Q, Q], Q, kv_heads=HKV, group=HQ // HKV, head_dim=D,
                   dtype=torch.bfloat16, device="cuda", skip=(3,))  # fmt: skip
    rows = (b.page_table, b.first, b.queries)
    lse = reference.logsumexp(b.q, b.k_cache, *rows, padded_queries=Q, scale=b.scale)
    args = (b.q, b.k_cache, lse, *rows, b.prefix, b.offset)
    want = reference.scores(*args, padded_queries=Q, scale=b.scale, capacity=b.packed)
    return args, b, reference.key16(want)


def check_score(setting) -> None:
    args, batch, want = score_case()
    out = torch.zeros_like(want)
    score_keys(*args, out, padded_queries=Q, scale=batch.scale, **setting)
    worst = int((out.int() - want.int()).abs().max())
    if worst > 1:
        raise RuntimeError(f"score {setting}: key16 is off by {worst} units")


def select_case(rows: int, length: int, layers: int, fixed_point: bool):
    """Skewed keys of `layers` layers, and where `rows` rows of `length` keys stand in them."""
    g = torch.Generator("cuda").manual_seed(1)
    scores = torch.exp(torch.randn(layers, rows * length + 16, generator=g, device="cuda") * 2.5 - 9)
    scores = scores.clamp_(max=1.0)
    keys = (scores * FIXED_ONE).to(torch.int32) if fixed_point else reference.key16(scores)
    index = torch.arange(rows, device="cuda")
    count = reference.selected_count(length, width=length, **BUDGET)
    selected = torch.zeros(layers, 1, rows + 1, count, dtype=torch.int32, device="cuda")
    prefix = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    return keys, index * length + 5, prefix, index.int() + 1, selected


def check_select(setting) -> None:
    for rows, length in ((3, 3000), (2, 7001), (2, 14000), (1, 40001)):
        args = select_case(rows, length, 2, setting["clear"])
        want_keys, want = args[0].clone(), args[4].clone()
        reference.select(want_keys, *args[1:4], want, clear=setting["clear"], **BUDGET)
        select(*args, **BUDGET, **{**setting, "clear": False})
        args[4].zero_()
        select(*args, **BUDGET, **setting)
        if not torch.equal(want, args[4]) or not torch.equal(want_keys, args[0]):
            raise RuntimeError(f"select {setting} is wrong at {rows} rows of {length} keys")


def measure(launch, flush) -> float:
    """Median microseconds of a launch in a CUDA graph, L2 flushed before each."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(23):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def sweep_score(flush) -> None:
    print(f"score: Hq {HQ}, Hkv {HKV}, D {D}, Q {Q}, bf16, one layer, random slots; us, % of K-only roofline")
    print(" ".join(f"{f'{r}x{n}':>16}" for r, n in SCORE_SHAPES), " setting")
    table = [[] for _ in SCORE_SETTINGS]
    for rows, length in SCORE_SHAPES:
        total = rows * length
        k_cache = torch.randn(total + 1, HKV, D, dtype=torch.bfloat16, device="cuda")
        pages = (torch.randperm(total, device="cuda") + 1).int().view(rows, length)
        q = torch.randn(rows * Q, HQ, D, dtype=torch.bfloat16, device="cuda")
        lse = torch.full((HQ, rows * Q), 10.0, device="cuda")
        prefix = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        offset = torch.arange(rows, device="cuda") * length
        out = torch.zeros(total, dtype=torch.int16, device="cuda")
        args = (q, k_cache, lse, pages, prefix - Q, torch.full_like(prefix, Q), prefix, offset, out)
        for i, setting in enumerate(SCORE_SETTINGS):

            def launch(args=args, setting=setting):
                score_keys(*args, padded_queries=Q, scale=D**-0.5, **setting)

            us = measure(launch, flush)
            table[i].append(f"{us:8.1f} {total * HKV * D * 2 / READ_BYTES_PER_S * 1e8 / us:5.1f} %")
    for cells, setting in zip(table, SCORE_SETTINGS, strict=True):
        print(" ".join(f"{c:>16}" for c in cells), "", *(f"{k}={v}" for k, v in setting.items()))


def sweep_select(flush) -> None:
    print(f"select: {LAYERS} layers in one launch, 5 %, at least 256, sink 4; ms (clear: int32 sums)")
    table = [[] for _ in SELECT_SETTINGS]
    for rows, length in SELECT_SHAPES:
        cases = {fixed: select_case(rows, length, LAYERS, fixed) for fixed in (False, True)}
        for i, setting in enumerate(SELECT_SETTINGS):
            # sums are timed as they are, without zeroing; zeroing is timed with the zeros it leaves
            def launch(setting=setting, cases=cases):
                select(*cases[setting["clear"]], **BUDGET, **{**setting, "clear": False})

            table[i].append(f"{measure(launch, flush) / 1e3:8.3f}")
            if setting["clear"]:

                def clearing(setting=setting, cases=cases):
                    select(*cases[True], **BUDGET, **setting)

                keys = cases[True][0].clone()
                table[i].append(f"(+clear {measure(clearing, flush) / 1e3:.3f})")
                cases[True][0].copy_(keys)
    print(" ".join(f"{f'{r}x{n}':>8}" for r, n in SELECT_SHAPES), " setting")
    for cells, setting in zip(table, SELECT_SETTINGS, strict=True):
        print(" ".join(cells), "", *(f"{k}={v}" for k, v in setting.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("score", "select"))
    parser.add_argument(
        "--processes", type=int, default=8, help="processes that compile and check (default 8)"
    )
    options = parser.parse_args()
    started = time.time()
    jobs = [(check_score, s) for s in SCORE_SETTINGS if options.only != "select"]
    jobs += [(check_select, s) for s in SELECT_SETTINGS if options.only != "score"]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        for future in [pool.submit(check, setting) for check, setting in jobs]:
            future.result()
    print(f"{torch.cuda.get_device_name()}: {len(jobs)} settings agree with the reference "
          f"({time.time() - started:.0f} s)", flush=True)  # fmt: skip
    flush = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    if options.only != "select":
        sweep_score(flush)
    if options.only != "score":
        sweep_select(flush)
    print(f"done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
