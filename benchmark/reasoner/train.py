#!/usr/bin/env python3
"""Train a Qwen3-architecture reasoner of about 30M parameters on synthetic long chains of thought.

On one H200, in minutes:
    python train.py --out runs/r1 --minutes 7                    # train, save, short evaluation
    python train.py --out runs/r1 --minutes 14 --resume          # go on with a longer schedule
    python train.py --mode eval --out runs/r1 --eval-minutes 6   # accuracy, sparsity, acceptance
    python train.py --mode data --n 64 --len 8192 --data-out prompts.jsonl   # prompts with answers
    python train.py --smoke --out runs/smoke                     # on a CPU, half a minute

Needs torch, numpy, transformers, tokenizers, safetensors and the modules beside this file.
"""

import argparse
import time

import data
import synth


def parse_args():
    P = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    A = P.add_argument
    A("--mode", default="all", choices=["all", "train", "eval", "data", "pack"])
    A("--out", default="runs/r1")
    A("--pack", default="")
    A("--minutes", type=float, default=7.0, help="length of the whole schedule, resumes included")
    A("--session-minutes", type=float, default=0, help="stop this call earlier (go on with --resume)")
    A("--eval-minutes", type=float, default=1.5)
    A("--resume", action="store_true")
    A("--steps", type=int, default=0)
    A("--seed", type=int, default=1)
    A("--hidden", type=int, default=512)
    A("--layers", type=int, default=8)
    A("--heads", type=int, default=8)
    A("--kv-heads", type=int, default=2)
    A("--head-dim", type=int, default=128)
    A("--ff", type=int, default=1536)
    A("--min-len", type=int, default=512)
    A("--max-len", type=int, default=16384)
    A("--batch-tokens", type=int, default=65536)
    A("--batch-tokens-late", type=int, default=131072)
    A("--late-at", type=float, default=0.5)
    A("--lr-muon", type=float, default=0.02)
    A("--lr-embed", type=float, default=2e-3)
    A("--lr-norm", type=float, default=6e-3)
    A("--lr-adamw", type=float, default=1e-3)
    A("--adamw", action="store_true", help="AdamW for everything")
    A("--wd", type=float, default=0.02)
    A("--zloss", type=float, default=1e-5)
    A("--compile", type=int, default=0)
    A("--cpu", action="store_true")
    A("--workers", type=int, default=12)
    A("--prefetch", type=int, default=24)
    A("--log-every", type=int, default=25)
    A("--save-every", type=float, default=75)
    A("--shard-mib", type=float, default=15.0)
    A("--k", type=int, default=8)
    A("--spec-lens", type=lambda s: [int(x) for x in s.split(",")], default=[4096, 8192])
    A("--spec-per-fam", type=int, default=4)
    A("--spec-rounds", type=int, default=60)
    A("--acc-lens", type=lambda s: [int(x) for x in s.split(",")], default=[2048, 8192])
    A("--acc-per-fam", type=int, default=16)
    A("--n", type=int, default=64)
    A("--len", type=int, default=8192)
    A("--fams", default="")
    A("--data-out", default="prompts.jsonl")
    A("--smoke", action="store_true")
    a = P.parse_args()
    if a.smoke:
        a.hidden, a.layers, a.heads, a.kv_heads, a.head_dim, a.ff = 64, 2, 4, 1, 32, 128
        a.min_len, a.max_len, a.batch_tokens, a.batch_tokens_late = 256, 512, 2048, 2048
        a.steps, a.workers, a.log_every, a.cpu = a.steps or 30, 2, 5, True
        a.spec_lens, a.spec_per_fam, a.spec_rounds, a.acc_lens, a.acc_per_fam, a.eval_minutes = (
            [384],
            1,
            4,
            [256],
            1,
            2,
        )
        a.lr_embed = 5e-3
    unknown = [f for f in a.fams.split(",") if f and f not in synth.FAMS]
    if unknown:
        P.error(f"--fams: unknown families {', '.join(unknown)}; there are {', '.join(synth.FAMS)}")
    return a


def main():
    a = parse_args()
    data.BUCKETS[:0] = [b for b in (256, 384) if a.min_len <= b < data.BUCKETS[0]]
    if a.mode == "data":
        data.make_data(a)
        return
    model, t0 = None, time.time()
    if a.mode in ("all", "train"):
        feed = data.Feed(a)  # forks: only now may torch be imported
        from trainer import train

        model = train(a, feed)
    if a.mode in ("all", "eval"):
        from evaluate import evaluate

        evaluate(a, model)
    if a.pack:
        from checkpoint import pack

        pack(a)
    print(f"total {time.time() - t0:.0f} s", flush=True)


if __name__ == "__main__":
    main()
