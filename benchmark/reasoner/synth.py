"""Synthetic problems with long chains of thought and exactly checkable answers. No torch here.

    python synth.py --len 1000        # show one problem of every family

The same seed gives the same problems on every machine and Python version from 3.11 up.
"""

import argparse
import random

import numpy as np
from families import FAMS, GENS, STYLED
from tokens import (  # noqa: F401  (the tokenizer is part of this module's interface)
    IM_END,
    N_USED,
    PAD,
    VOCAB_SIZE,
    decode,
    encode,
    save_tokenizer,
)

WEIGHT = {"prog": 3, "ledger": 3, "walk": 3, "bfs": 2, "color": 2, "bucket": 1.5, "addl": 1}
EST0 = {"prog": 45.0, "ledger": 75.0, "walk": 45.0, "bfs": 40.0, "color": 35.0, "bucket": 66.0, "addl": 100.0}


def render_prompt(prompt):
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def render_completion(trace, answer):
    return f"<think>\n{trace}</think>\nAnswer: {answer}<|im_end|>"


class DocMaker:
    """Makes documents whose token count lies in about [0.55 T, T].

    Args:
        seed: of the random generator; equal seeds give equal documents.
        fams: families to draw from, all by default. Raises ValueError for an unknown one.
    """

    def __init__(self, seed, fams=None):
        self.r = random.Random(seed)
        self.fams = fams or FAMS
        if unknown := [f for f in self.fams if f not in GENS]:
            raise ValueError(f"unknown families {unknown}; there are {', '.join(FAMS)}")
        self.w = [WEIGHT[f] for f in self.fams]
        self.est = {}  # (family, T) -> running tokens per unit

    def doc(self, T, fam=None, lo=0.55):
        """One document of at most T tokens, or None where the family has none of that size.

        Keys: fam, prompt, trace, answer (texts), p and c (token ids of prompt and completion).
        """
        r = self.r
        for _ in range(30 if fam else 200):
            f = fam or r.choices(self.fams, self.w)[0]
            long = f in STYLED and r.random() < 0.7
            e = self.est.setdefault((f, T, long), EST0[f] * (1.5 if long else 1.0))
            n = max(3, int(T * r.uniform(0.82, 1.0) / e))
            g = GENS[f](r, n, long) if f in STYLED else GENS[f](r, n)
            if g is None:
                continue
            p = encode(render_prompt(g[0]))
            c = encode(render_completion(g[1], g[2]))
            L = len(p) + len(c)
            self.est[f, T, long] = e + 0.1 * (L / n - e)
            if L > T or L < lo * T:
                continue
            return {"fam": f, "prompt": g[0], "trace": g[1], "answer": g[2], "p": p, "c": c}
        if fam is not None and lo > 0.1:
            return self.doc(T, fam, lo / 2)
        return None  # this family has no document of that size

    def batch(self, B, T):
        """B documents as arrays: ids (B, T), prompt lengths, document lengths and family numbers (B,).

        Raises RuntimeError when no family has a document of at most T tokens.
        """
        ids = np.zeros((B, T), dtype=np.uint16)
        st = np.zeros(B, dtype=np.int32)
        ln = np.zeros(B, dtype=np.int32)
        fm = np.zeros(B, dtype=np.int32)
        for b in range(B):
            d, lo = None, 0.55
            while d is None:
                d, lo = self.doc(T, lo=lo), lo * 0.7
                if lo < 0.01:
                    raise RuntimeError(f"no document fits {T} tokens")
            s = d["p"] + d["c"]
            ids[b, : len(s)] = s
            st[b], ln[b], fm[b] = len(d["p"]), len(s), FAMS.index(d["fam"])
        return ids, st, ln, fm


def main():
    parser = argparse.ArgumentParser(description="Show one problem of every family.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--len", type=int, default=700, help="tokens of prompt and completion together")
    args = parser.parse_args()
    maker = DocMaker(args.seed)
    for fam in FAMS:
        d = maker.doc(args.len, fam)
        if d is None:
            print(f"=== {fam}: no document of at most {args.len} tokens")
            continue
        print(
            f"=== {fam}: {len(d['p'])} + {len(d['c'])} tokens\n{d['prompt']}\n---\n{d['trace']}Answer: {d['answer']}"
        )


if __name__ == "__main__":
    main()
