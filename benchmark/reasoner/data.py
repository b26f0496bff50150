"""Training documents from worker processes, and problem files. No torch: forked workers stay small."""

import json
import math
import multiprocessing as mp
import os
import queue
import random

import synth
from synth import FAMS, DocMaker

BUCKETS = [512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]


def pick_T(r, p, max_len, min_len=512):
    """Curriculum: the largest length grows from 512 (p=0) to max_len (p=0.55)."""
    lo, hi = math.log2(min_len), math.log2(max_len)
    top = lo + (hi - lo) * min(1.0, p / 0.55)
    top = max(top, lo + min(1.0, hi - lo))
    x = r.uniform(max(lo, top - (2.2 if p < 0.7 else 3.0)), top)
    ok = [b for b in BUCKETS if min_len <= b <= max_len] or [min_len]
    return min(ok, key=lambda b: abs(math.log2(b) - x))


def _worker(wid, seed, prog, q, a):
    try:
        os.nice(2)
    except OSError:
        pass
    mk = DocMaker(seed * 1000 + wid, a.fams.split(",") if a.fams else None)
    r = random.Random(seed * 7919 + wid)
    while True:
        p = prog.value
        if p < 0:
            return
        T = pick_T(r, p, a.max_len, a.min_len)
        bt = a.batch_tokens if p < a.late_at else a.batch_tokens_late
        b = mk.batch(max(1, bt // T), T)
        while True:
            try:
                q.put((T, *b), timeout=2)
                break
            except queue.Full:
                if prog.value < 0:
                    return


class Feed:
    """Worker processes that fill a queue with batches for the trainer.

    Make it before anything imports torch: the workers are forked, and CUDA does not survive a fork.
    `progress.value` is the share of the schedule that is done; it steers the curriculum.
    """

    def __init__(self, a):
        ctx = mp.get_context("fork")
        state = read_train_state(a)
        self.progress = ctx.Value("d", min(1.0, state["spent_s"] / (a.minutes * 60)))
        self.queue = ctx.Queue(maxsize=a.prefetch)
        seed = a.seed + state["step"]  # a resumed run must not see the same documents again
        self.workers = [
            ctx.Process(target=_worker, args=(i, seed, self.progress, self.queue, a), daemon=True)
            for i in range(a.workers)
        ]
        for process in self.workers:
            process.start()

    def get(self):
        """(length, ids (B, length), prompt lengths (B,), document lengths (B,), families (B,)), as numpy arrays.

        Raises RuntimeError when every worker has died.
        """
        while True:
            try:
                return self.queue.get(timeout=20)
            except queue.Empty:
                if not any(process.is_alive() for process in self.workers):
                    raise RuntimeError("all data workers died; their errors stand above") from None

    def stop(self):
        self.progress.value = -1.0
        for process in self.workers:
            if process.is_alive():
                process.terminate()
        self.queue.cancel_join_thread()


def read_train_state(a):
    """Step, seconds and tokens of the run to resume in `a.out`; zeros for a new run."""
    path = os.path.join(a.out, "train_state.json")
    if a.resume and os.path.exists(path) and os.path.exists(os.path.join(a.out, "ckpt.pt")):
        with open(path) as f:
            return json.load(f)
    return {"step": 0, "spent_s": 0.0, "tokens": 0}


def make_data(a):
    """Write `a.n` problems with answers and worked chains to `a.data_out`, one JSON object a line."""
    mk = DocMaker(a.seed)
    fams = a.fams.split(",") if a.fams else FAMS
    written = 0
    with open(a.data_out, "w") as f:
        for i in range(a.n):
            d = mk.doc(a.len, fams[i % len(fams)], lo=0.7)
            if d is None:
                continue
            row = {
                "id": i,
                "family": d["fam"],
                "prompt": d["prompt"],
                "answer": d["answer"],
                "prompt_tokens": len(d["p"]),
                "completion_tokens": len(d["c"]),
                "gold": synth.render_completion(d["trace"], d["answer"]),
            }
            f.write(json.dumps(row) + "\n")
            written += 1
    print(f"wrote {written} problems to {a.data_out}")
