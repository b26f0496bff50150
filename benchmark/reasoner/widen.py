#!/usr/bin/env python3
"""Function-preserving expansion of a small Qwen3 checkpoint to a big Qwen3 shape.

    python widen.py --src runs/r1 --dst runs/r1-8b --shape 8b            # ~16.4 GB of shards
    python widen.py --src runs/r1 --dst runs/r1-8b --shape 8b --verify   # compare with HF
    python widen.py --selftest                                               # toy shapes on the CPU

How the big model computes the same function (h = small hidden size, H = big hidden size):
  hidden     the residual stream holds R = H/h copies of the small one.  The mean square is then
             unchanged, so RMSNorm keeps weight and eps.  Matrices that read it use P copies
             (P = largest power of two <= R) with weight W/P (exact in bf16), the others get zero;
             matrices that write it repeat their rows.
  heads      each small KV head is copied HK/hk times; query heads of a copied group are copies
             of the small group's heads; o_proj divides by the (power of two) number of copies.
  MLP        neurons are copied; down_proj divides by the number of copies.
  layers     every real layer is preceded by identity layers: copies of it (norms, q/k/v, gate/up)
             with o_proj = down_proj = 0.  Since an identity layer leaves the residual unchanged, the
             copy sees the very input of its real layer: it has the same queries, keys and attention.
  vocabulary ids beyond the small vocabulary get the lm_head row of that never-used small token
             whose logit is the most negative over sample text (logits stay far below the best).
  final norm weight/P on P copies and 0 elsewhere, so that tied and untied lm_heads both work.
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import tempfile
import time

import synth
import torch
from checkpoint import hf_config, load_hf, model_cfg, save_hf, write_json, write_shards
from model import LM


def qwen3(hidden, layers, heads, ff, tie, kv_heads=8, **more):
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ff,
        "tie": tie,
        **more,
    }


SHAPES = {
    "0.6b": qwen3(1024, 28, 16, 3072, True),
    "1.7b": qwen3(2048, 28, 16, 6144, True),
    "4b": qwen3(2560, 36, 32, 9728, True),
    "8b": qwen3(4096, 36, 32, 12288, False),
    "14b": qwen3(5120, 40, 40, 17408, False),
    "32b": qwen3(5120, 64, 64, 25600, False),
}


def p2(n):
    return 1 << (n.bit_length() - 1)


def require(ok, what):
    if not ok:
        raise ValueError(f"cannot widen: {what}. Choose another --shape, or another small model.")


class Widener:
    """Yields the tensors of a big checkpoint. Raises ValueError when the shapes do not fit."""

    def __init__(self, sd, c, big, dev):
        self.sd, self.c, self.b, self.dev = sd, c, big, dev
        h, H = c["hidden_size"], big["hidden_size"]
        require(H % h == 0, f"the big hidden size {H} must be a multiple of the small one, {h}")
        self.R = H // h
        self.P = p2(self.R)
        hq, hk, HQ, HK = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            big["num_attention_heads"],
            big["num_key_value_heads"],
        )
        require(HK % hk == 0, f"the big number of KV heads {HK} must be a multiple of the small one, {hk}")
        require(
            HQ % HK == 0 and hq % hk == 0,
            f"query heads ({HQ}, {hq}) must be multiples of KV heads ({HK}, {hk})",
        )
        rk, gs, GB = HK // hk, hq // hk, HQ // HK
        require(rk * GB >= gs, f"{HQ} query heads are too few to hold the small model's {hq}")
        self.kv_src = [j // rk for j in range(HK)]
        self.q_src = []
        for j in range(HK):
            for g in range(GB):
                slot = (j % rk) * GB + g
                self.q_src.append((j // rk) * gs + slot % gs)
        self.q_scale = [0.0] * HQ
        for s in range(hq):
            cp = [i for i, x in enumerate(self.q_src) if x == s]
            for i in cp[: p2(len(cp))]:
                self.q_scale[i] = 1.0 / p2(len(cp))
        f, FF = c["intermediate_size"], big["intermediate_size"]
        require(FF >= f, f"the big intermediate size {FF} must be at least the small one, {f}")
        self.Pf = p2(FF // f)
        self.f_src = torch.arange(FF, device=dev) % f
        self.f_act = torch.arange(FF, device=dev) // f < self.Pf
        n, N = c["num_hidden_layers"], big["num_hidden_layers"]
        require(N >= n, f"the big model needs at least the {n} layers of the small one, got {N}")
        real_at = [(layer + 1) * N // n - 1 for layer in range(n)]
        self.plan, layer = [], 0  # (small layer, whether it acts) of every big layer
        for i in range(N):
            self.plan.append((layer, i == real_at[layer]))
            if i == real_at[layer]:
                layer += 1

    def t(self, n):
        return self.sd[n].to(self.dev)

    def read(self, W):
        """(out, h) -> (out, H)"""
        z = torch.zeros_like(W)
        return torch.cat([W / self.P] * self.P + [z] * (self.R - self.P), 1)

    def write(self, W):
        """(h, in) -> (H, in)"""
        return W.repeat(self.R, 1)

    def heads(self, W, src):
        D = self.c["head_dim"]
        return W.view(-1, D, W.shape[1])[torch.tensor(src, device=W.device)].reshape(len(src) * D, W.shape[1])

    def tensors(self, pad_row):
        c, b = self.c, self.b
        D = c["head_dim"]
        E = self.t("model.embed_tokens.weight")
        V, v = b["vocab_size"], E.shape[0]
        used = synth.N_USED if v == synth.VOCAB_SIZE else v
        Et = E.repeat(1, self.R)

        def table(fill):
            out = torch.empty(V, Et.shape[1], dtype=E.dtype, device=self.dev)
            out[:v] = Et
            out[v:] = fill
            return out

        if b["tie"]:
            yield "model.embed_tokens.weight", table(Et[pad_row])
        else:  # ids past the small vocabulary read as some ordinary token
            yield "model.embed_tokens.weight", table(Et[torch.arange(v, V, device=self.dev) % used])
        for i, (src, real) in enumerate(self.plan):
            s, d = f"model.layers.{src}.", f"model.layers.{i}."
            yield d + "input_layernorm.weight", self.t(s + "input_layernorm.weight").repeat(self.R)
            yield (
                d + "self_attn.q_proj.weight",
                self.read(self.heads(self.t(s + "self_attn.q_proj.weight"), self.q_src)),
            )
            yield (
                d + "self_attn.k_proj.weight",
                self.read(self.heads(self.t(s + "self_attn.k_proj.weight"), self.kv_src)),
            )
            yield (
                d + "self_attn.v_proj.weight",
                self.read(self.heads(self.t(s + "self_attn.v_proj.weight"), self.kv_src)),
            )
            yield d + "self_attn.q_norm.weight", self.t(s + "self_attn.q_norm.weight").clone()
            yield d + "self_attn.k_norm.weight", self.t(s + "self_attn.k_norm.weight").clone()
            out = self.t(s + "self_attn.o_proj.weight")  # (h, hq*D)
            out = out.view(out.shape[0], -1, D)[:, torch.tensor(self.q_src, device=self.dev)]
            out = (out * torch.tensor(self.q_scale, device=self.dev, dtype=out.dtype)[None, :, None]).reshape(
                out.shape[0], -1
            )
            yield (
                d + "self_attn.o_proj.weight",
                self.write(out)
                if real
                else torch.zeros(b["hidden_size"], out.shape[1], dtype=out.dtype, device=self.dev),
            )
            yield (
                d + "post_attention_layernorm.weight",
                self.t(s + "post_attention_layernorm.weight").repeat(self.R),
            )
            yield d + "mlp.gate_proj.weight", self.read(self.t(s + "mlp.gate_proj.weight")[self.f_src])
            yield d + "mlp.up_proj.weight", self.read(self.t(s + "mlp.up_proj.weight")[self.f_src])
            W = self.t(s + "mlp.down_proj.weight")[:, self.f_src]
            W = torch.where(self.f_act[None], W / self.Pf, torch.zeros_like(W))
            yield (
                d + "mlp.down_proj.weight",
                self.write(W)
                if real
                else torch.zeros(b["hidden_size"], W.shape[1], dtype=W.dtype, device=self.dev),
            )
        nw = self.t("model.norm.weight")
        yield (
            "model.norm.weight",
            torch.cat([nw / self.P] * self.P + [torch.zeros_like(nw)] * (self.R - self.P)),
        )
        if not b["tie"]:
            yield "lm_head.weight", table(Et[pad_row])


def read_config(src):
    with open(os.path.join(src, "config.json")) as f:
        return json.load(f)


@functools.cache
def sample_docs(n=7, T=1024, seed=99):
    """The first n families' documents of at most T tokens; a family without one of that size is left out."""
    maker = synth.DocMaker(seed)
    docs = (maker.doc(T, family) for family in synth.FAMS)
    return list(itertools.islice((doc for doc in docs if doc), n))


def choose_pad_row(model, dev):
    """The small-vocabulary id whose logit is the furthest below the best one, in the worst case."""
    worst = None
    with torch.no_grad():
        for d in sample_docs():
            ids = torch.tensor([d["p"] + d["c"]], device=dev)
            lg = model.logits(model.hidden(ids)).float()[0]
            m = (lg - lg.max(-1, keepdim=True).values).max(0).values  # closest approach of each id
            worst = m if worst is None else torch.maximum(worst, m)
    i = int(worst.argmin())
    return i, float(worst[i])


def widen(src, dst, big, dev, shard_gb=4.0):
    t0 = time.time()
    small = load_hf(src, dev, torch.float32)
    pad_row, margin = choose_pad_row(small, dev)
    sd = {k: v.detach().to(torch.bfloat16) for k, v in small.state_dict().items()}
    c = small.c
    os.makedirs(dst, exist_ok=True)
    for f in os.listdir(dst):
        if f.endswith(".safetensors") or f == "model.safetensors.index.json":
            os.remove(os.path.join(dst, f))
    w = Widener(sd, c, big, dev)
    n, tot = write_shards(dst, w.tensors(pad_row), int(shard_gb * 2**30))
    bc = dict(c)
    bc.update({k: v for k, v in big.items() if k != "tie"})
    out = hf_config(
        bc,
        tie_word_embeddings=big["tie"],
        max_position_embeddings=read_config(src)["max_position_embeddings"],
    )
    out["widened_from"] = {
        "hidden_copies": w.R,
        "active_copies": w.P,
        "real_layers": [i for i, (_, r) in enumerate(w.plan) if r],
        "layer_source": [layer for layer, _ in w.plan],
        "kv_source": w.kv_src,
        "q_source": w.q_src,
        "pad_vocab_row": pad_row,
        "pad_vocab_margin": margin,
        "small_vocab": c["vocab_size"],
    }
    write_json(os.path.join(dst, "config.json"), out, 1)
    for f in (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ):
        if os.path.exists(os.path.join(src, f)):
            shutil.copy(os.path.join(src, f), os.path.join(dst, f))
    print(
        f"wrote {n} shards, {tot / 1e9:.2f} GB, hidden x{w.R} (active {w.P}), real layers at {out['widened_from']['real_layers']}, "
        f"pad vocab row {pad_row} stays >= {-margin:.1f} below the best logit on samples, {time.time() - t0:.0f} s",
        flush=True,
    )


def verify(src, dst, dev, dtype, T=1024, gen=160, ndocs=7):
    """Compare both checkpoints in transformers: logits on gold text, argmax, greedy continuation.

    Returns (largest logit difference, equal argmaxes, positions, equal generated tokens, generated tokens).
    """
    from transformers import AutoModelForCausalLM

    s = AutoModelForCausalLM.from_pretrained(src, dtype=dtype).to(dev).eval()
    b = AutoModelForCausalLM.from_pretrained(dst, dtype=dtype).to(dev).eval()
    v = s.config.vocab_size
    docs = sample_docs(ndocs, T, seed=7)
    md, agree, tot, same, gt, padmax, flips = 0.0, 0, 0, 0, 0, -1e9, []
    with torch.no_grad():
        for d in docs:
            ids = torch.tensor([d["p"] + d["c"]], device=dev)
            l1, l2 = s(ids).logits.float()[0], b(ids).logits.float()[0]
            md = max(md, (l1 - l2[:, :v]).abs().max().item())
            a1, a2 = l1.argmax(-1), l2.argmax(-1)
            agree += int((a1 == a2).sum())
            for p in (a1 != a2).nonzero().flatten().tolist():
                top = l1[p].topk(2).values
                flips.append(round((top[0] - top[1]).item(), 4))
            tot += a1.numel()
            padmax = (
                max(padmax, (l2[:, v:].max(-1).values - l2[:, :v].max(-1).values).max().item())
                if l2.shape[1] > v
                else padmax
            )
            cut = len(d["p"]) + 40
            kw = {"max_new_tokens": gen, "do_sample": False, "pad_token_id": 0}
            g1, g2 = (
                s.generate(ids[:, :cut], **kw)[0, cut:].tolist(),
                b.generate(ids[:, :cut], **kw)[0, cut:].tolist(),
            )
            k = min(len(g1), len(g2))
            same += next((i for i in range(k) if g1[i] != g2[i]), k)
            gt += k
    print(
        f"verify {dtype}: max |logit diff| {md:.3g}, argmax agreement {agree}/{tot} (small model's margins at the flips {sorted(flips)[-8:]}), "
        f"greedy common prefix {same}/{gt}, best pad-vocab logit minus best real logit {padmax:.2f}",
        flush=True,
    )
    return md, agree, tot, same, gt


def selftest(workdir, src=None):
    """Widen a random (or the given) toy checkpoint to several awkward shapes, in fp32 and bf16.

    Raises RuntimeError when a widened model does not compute the small one's function in fp32.
    """
    torch.manual_seed(3)
    if src is None:
        src = os.path.join(workdir, "small")
        a = argparse.Namespace(out=src, hidden=32, layers=3, heads=8, kv_heads=2, head_dim=16, ff=48)
        c = model_cfg(a)
        m = LM(c, torch.float32)
        with torch.no_grad():
            for n, p in m.named_parameters():
                if p.dim() == 1:
                    p.mul_(1 + 0.3 * torch.randn_like(p))
                elif "embed" in n:
                    p.mul_(8)
                else:
                    p.mul_(2.0)
        save_hf(c, {k: v.detach() for k, v in m.state_dict().items()}, src)
    cfg = read_config(src)
    h, L, f = cfg["hidden_size"], cfg["num_hidden_layers"], cfg["intermediate_size"]
    hk = cfg["num_key_value_heads"]
    toys = {
        "like8b": qwen3(8 * h, 4 * L + 1, 16 * hk, 8 * f, False, 4 * hk, vocab_size=3000),
        "like1.7b": qwen3(4 * h, 3 * L + 1, 8 * hk, 4 * f, True, 4 * hk, vocab_size=3000),
        "like14b": qwen3(10 * h, 2 * L, 20 * hk, 11 * f + 32, False, 4 * hk, vocab_size=2000),
    }
    for name, big in toys.items():
        dst = os.path.join(workdir, name)
        print("==", name, flush=True)
        widen(src, dst, big, torch.device("cpu"))
        diff, agree, total, same, generated = verify(src, dst, torch.device("cpu"), torch.float32, 320, 8, 2)
        if diff > 1e-3 or agree != total or same != generated:
            raise RuntimeError(f"{name} computes another function than the small model: see the line above")
        verify(src, dst, torch.device("cpu"), torch.bfloat16, 320, 8, 2)


def main():
    P = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    A = P.add_argument
    A("--src")
    A("--dst")
    A("--shape", default="8b", choices=list(SHAPES))
    A("--layers", type=int, default=0, help="another number of layers")
    A("--vocab", type=int, default=151936)
    A("--shard-gb", type=float, default=4.0)
    A("--verify", action="store_true")
    A("--verify-len", type=int, default=1024)
    A("--selftest", action="store_true")
    A("--workdir", help="folder of the self-test's models (default: a temporary one, removed at the end)")
    a = P.parse_args()
    if a.selftest:
        with tempfile.TemporaryDirectory() as made:
            workdir = a.workdir or made
            os.makedirs(workdir, exist_ok=True)
            selftest(workdir, a.src)
        return
    if not a.src or not a.dst:
        P.error("--src and --dst are needed: the small checkpoint's folder and the big one's")
    if not os.path.isfile(os.path.join(a.src, "config.json")):
        P.error(f"--src: {a.src!r} holds no config.json, so it is no checkpoint")
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    big = dict(SHAPES[a.shape], vocab_size=a.vocab)
    if a.layers:
        big["num_hidden_layers"] = a.layers
    if not a.verify:
        widen(a.src, a.dst, big, dev, a.shard_gb)
    else:
        verify(a.src, a.dst, dev, torch.bfloat16, T=a.verify_len)


if __name__ == "__main__":
    main()
