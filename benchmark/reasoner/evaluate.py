"""Accuracy, sparsity and simulated acceptance of a checkpoint; writes eval.json beside it."""

import os
import time

import numpy as np
import synth
import torch
from checkpoint import load_hf, write_json
from generate import generate
from model import LAYER_FN, SDPA, plain_layer
from specsim import ngram_sim, specsim
from synth import FAMS, DocMaker


def answer_of(text):
    if "</think>" not in text:
        return None
    t = text.split("</think>")[-1]
    return t.split("Answer:")[-1].replace("<|im_end|>", "").strip() if "Answer:" in t else None


def eval_accuracy(model, a, dev, lens, per_fam, deadline):
    res = {}
    for T in lens:
        mk = DocMaker(987654 + T)
        docs = [d for f in FAMS for _ in range(per_fam) if (d := mk.doc(T, f)) is not None]
        if time.time() > deadline:
            break
        t0 = time.time()
        gens = generate(model, [d["p"] for d in docs], T + 32, dev, deadline)
        dt = time.time() - t0
        per = {}
        for d, g in zip(docs, gens):
            r_ = per.setdefault(
                d["fam"],
                {
                    "n": 0,
                    "exact": 0,
                    "trace_exact": 0,
                    "gold_len": [],
                    "gen_len": [],
                    "prompt_len": [],
                    "first_err": [],
                },
            )
            r_["n"] += 1
            txt = synth.decode(g)
            r_["exact"] += answer_of(txt) == d["answer"]
            r_["trace_exact"] += g == d["c"]
            r_["gold_len"].append(len(d["c"]))
            r_["gen_len"].append(len(g))
            r_["prompt_len"].append(len(d["p"]))
        out = {}
        for f, r_ in per.items():
            out[f] = {
                "n": r_["n"],
                "exact": r_["exact"] / r_["n"],
                "trace_exact": r_["trace_exact"] / r_["n"],
                "prompt": float(np.mean(r_["prompt_len"])),
                "gold_len": float(np.mean(r_["gold_len"])),
                "gen_len": float(np.mean(r_["gen_len"])),
            }
        ntok = sum(len(g) for g in gens)
        res[T] = {
            "families": out,
            "exact": float(np.mean([o["exact"] for o in out.values()])),
            "gen_tokens": ntok,
            "seconds": dt,
        }
        print(
            f"acc T={T}: exact {res[T]['exact']:.3f} | "
            + " ".join(
                f"{f}:{o['exact']:.2f} (len {o['gen_len']:.0f}/{o['gold_len']:.0f})" for f, o in out.items()
            )
            + f" | {ntok} tok in {dt:.1f}s",
            flush=True,
        )
    return res


def eval_spec(model, a, dev, deadline):
    """Acceptance of the different drafts on the same documents and depths."""
    rep = {"configs": []}
    mk = DocMaker(24681)
    for T in a.spec_lens:
        docs, fams, starts = [], [], []
        for f in FAMS:
            for _ in range(a.spec_per_fam):
                d = mk.doc(T, f, lo=0.7)
                if d is None:
                    continue
                s = d["p"] + d["c"]
                docs.append(s)
                fams.append(f)
                starts.append(max(len(d["p"]) + 16, int(len(s) * 0.6)))
        cfgs = [{"policy": "full"}]
        cfgs += [
            {"policy": "pillar", "ratio": r_, "minb": m, "head_mode": h}
            for r_, m, h in [
                (0.05, 64, "layer"),
                (0.05, 64, "kv"),
                (0.05, 128, "kv"),
                (0.05, 256, "layer"),
                (0.05, 256, "kv"),
                (0.10, 64, "kv"),
                (0.10, 256, "kv"),
                (0.10, 256, "layer"),
            ]
        ]
        cfgs += [
            {"policy": "window", "ratio": r_, "minb": m} for r_, m in [(0.05, 64), (0.05, 256), (0.10, 256)]
        ]
        cfgs += [
            {"policy": "pillar", "ratio": 0.05, "minb": 64, "head_mode": "kv", "recent": 0},
            {"policy": "pillar", "ratio": 0.05, "minb": 64, "head_mode": "kv", "queries": "acc"},
        ]
        ref = None
        for cf in cfgs:
            if time.time() > deadline:
                break
            t0 = time.time()
            rounds = a.spec_rounds if cf["policy"] != "full" else max(4, a.spec_rounds // 8)
            r_, per, outs = specsim(model, docs, starts, rounds, dev, k=a.k, deadline=deadline, **cf)
            r_["T"] = T
            r_["start"] = [min(starts), max(starts)]
            r_["by_family"] = {
                f: float(
                    np.mean(sum([per[i] for i in range(len(docs)) if fams[i] == f], []) or [float("nan")])
                )
                for f in FAMS
            }
            rep["configs"].append(r_)
            if cf["policy"] == "pillar" and ref is None:
                ref = outs
            x = r_
            print(
                f"spec T={T} {x['policy']} {cf.get('ratio', '')} min {cf.get('minb', '')} {cf.get('head_mode', '')} {'recent0' if cf.get('recent') == 0 else ''}{cf.get('queries', '')} budget {x['mean_budget']:.0f}: "
                f"accepted {x['mean_accepted'] if x['mean_accepted'] is not None else float('nan'):.2f}/{a.k} rounds {x['rounds']} {time.time() - t0:.1f}s | "
                + " ".join(f"{f}:{v:.2f}" for f, v in x["by_family"].items())
                + (
                    f" | kept {np.mean(x['kept_by_layer']):.3f} window {np.mean(x['window_kept_by_layer']):.3f} oracle {np.mean(x['oracle_kept_by_layer']):.3f}"
                    if "kept_by_layer" in x
                    else ""
                ),
                flush=True,
            )
        if ref is not None:
            acc = {f: [] for f in FAMS}
            for i, o in enumerate(ref):
                acc[fams[i]] += ngram_sim(docs[i][: starts[i]], o, a.k)
            allx = sum(acc.values(), [])
            if allx:
                rep["configs"].append(
                    {
                        "policy": "ngram",
                        "T": T,
                        "k": a.k,
                        "rounds": len(allx),
                        "mean_accepted": float(np.mean(allx)),
                        "by_family": {f: float(np.mean(v)) if v else None for f, v in acc.items()},
                    }
                )
                print(
                    f"spec T={T} ngram (prompt lookup, n<=4): accepted {np.mean(allx):.2f}/{a.k} | "
                    + " ".join(f"{f}:{np.mean(v) if v else float('nan'):.2f}" for f, v in acc.items()),
                    flush=True,
                )
    return rep


def evaluate(a, model=None):
    if model is None:
        dev = torch.device("cuda" if torch.cuda.is_available() and not a.cpu else "cpu")
        dt = torch.bfloat16 if dev.type == "cuda" else torch.float32
        model = load_hf(a.out, dev, dt)
    else:
        dev = next(model.parameters()).device
        dt = torch.bfloat16 if dev.type == "cuda" else torch.float32
        LAYER_FN[0] = plain_layer
        model = model.to(dt).eval()
    SDPA.update(mode="rep", backend=None)  # odd prompt lengths: let torch choose the back end
    t0 = time.time()
    end = t0 + a.eval_minutes * 60
    rep = {"args": vars(a)}
    path = os.path.join(a.out, "eval.json")
    print("--- speculation and sparsity", flush=True)
    rep["spec"] = eval_spec(model, a, dev, t0 + a.eval_minutes * 60 * 0.55)
    write_json(path, rep)
    print("--- accuracy (greedy)", flush=True)
    rep["accuracy"] = eval_accuracy(model, a, dev, a.acc_lens, a.acc_per_fam, end)
    write_json(path, rep)
    print(f"eval took {time.time() - t0:.0f} s, report {path}", flush=True)
    return rep
