"""Batched greedy generation with a dense KV cache, through a CUDA graph where there is a GPU."""

import time

import synth
import torch
import torch.nn.functional as F
from model import sdpa


class Cache:
    def __init__(self, model, B, Tmax, dev):
        c = model.c
        sh = (B, c["num_key_value_heads"], Tmax, c["head_dim"])
        self.k = [torch.zeros(sh, device=dev, dtype=model.dt) for _ in range(c["num_hidden_layers"])]
        self.v = [torch.zeros(sh, device=dev, dtype=model.dt) for _ in range(c["num_hidden_layers"])]
        self.T = Tmax


def prefill(model, cache, rows, dev, chunk_tokens=131072):
    """rows: list of token lists (any lengths). Fills the cache, returns argmax after each row."""
    out = [0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    i = 0
    while i < len(order):
        j = i
        while j < len(order) and len(rows[order[j]]) * (j - i + 1) <= max(chunk_tokens, len(rows[order[j]])):
            j += 1
        sel = order[i:j]
        n = len(rows[sel[-1]])
        ids = torch.zeros(len(sel), n, dtype=torch.long)
        for x, b in enumerate(sel):
            ids[x, : len(rows[b])] = torch.tensor(rows[b])
        ids = ids.to(dev)
        cos, sin = model.cs(cache.T, dev)
        cos, sin = cos[None, :n, None], sin[None, :n, None]
        x = F.embedding(ids, model.model.embed_tokens.weight).to(model.dt)
        si = torch.tensor(sel, device=dev)
        for li, layer in enumerate(model.model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
            cache.k[li][si, :, :n] = k
            cache.v[li][si, :, :n] = v
            o = sdpa(q, k, v).transpose(1, 2).reshape(len(sel), n, -1)
            x = x + layer.self_attn.o_proj(o)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = torch.tensor([len(rows[b]) - 1 for b in sel], device=dev)
        lg = model.logits(model.model.norm(x[torch.arange(len(sel), device=dev), last]))
        for x_, b in zip(lg.argmax(-1).tolist(), sel):
            out[b] = x_
        i = j
    return out


def decode_step(model, cache, buf, pos, bidx, ar, cs_tab):
    """buf (B,Tmax) tokens, pos (B,) index of the last known token: writes buf[pos+1]."""
    tok = buf[bidx, pos]
    cos, sin = cs_tab[0][pos][:, None, None], cs_tab[1][pos][:, None, None]
    x = F.embedding(tok[:, None], model.model.embed_tokens.weight).to(model.dt)
    mask = (ar[None] <= pos[:, None])[:, None, None]  # B,1,1,Tmax
    Hk = model.c["num_key_value_heads"]
    B = buf.shape[0]
    for li, layer in enumerate(model.model.layers):
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
        cache.k[li][bidx, :, pos] = k[:, :, 0]
        cache.v[li][bidx, :, pos] = v[:, :, 0]
        qg = q.reshape(B, Hk, -1, q.shape[-1])
        o = F.scaled_dot_product_attention(
            qg, cache.k[li], cache.v[li], attn_mask=mask.expand(B, Hk, qg.shape[2], ar.shape[0])
        )
        x = x + layer.self_attn.o_proj(o.reshape(B, 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    nxt = model.logits(model.model.norm(x[:, 0])).argmax(-1)
    np_ = torch.clamp(pos + 1, max=buf.shape[1] - 1)
    buf[bidx, np_] = nxt
    pos.copy_(np_)


def generate(model, rows, max_total, dev, deadline=None):
    """Greedy batched generation. Returns a list of generated token lists (cut at <|im_end|>)."""
    B = len(rows)
    Tm = -(-max_total // 64) * 64
    with torch.no_grad():
        cache = Cache(model, B, Tm, dev)
        first = prefill(model, cache, rows, dev)
        buf = torch.zeros(B, Tm, dtype=torch.long, device=dev)
        for b, r_ in enumerate(rows):
            buf[b, : len(r_)] = torch.tensor(r_, device=dev)
            buf[b, len(r_)] = first[b]
        lens = [len(r_) for r_ in rows]
        pos = torch.tensor(lens, device=dev)
        bidx, ar, cs_tab = torch.arange(B, device=dev), torch.arange(Tm, device=dev), model.cs(Tm, dev)
        args = (model, cache, buf, pos, bidx, ar, cs_tab)
        graph = None
        if dev.type == "cuda":
            try:
                p0 = pos.clone()
                s = torch.cuda.Stream()
                s.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(s):
                    for _ in range(2):
                        decode_step(*args)
                torch.cuda.current_stream().wait_stream(s)
                pos.copy_(p0)
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g):
                    decode_step(*args)
                graph = g
                pos.copy_(p0)
            except RuntimeError as e:
                print("no CUDA graph:", str(e).splitlines()[0][:120], flush=True)
                torch.cuda.synchronize()
        n = 0
        steps = max_total - min(lens) - 1
        eos_at = torch.full((B,), Tm, device=dev)
        while n < steps:
            for _ in range(min(64, steps - n)):
                graph.replay() if graph is not None else decode_step(*args)
                n += 1
            gen = (
                (ar[None] >= torch.tensor(lens, device=dev)[:, None])
                & (ar[None] <= pos[:, None])
                & (buf == synth.IM_END)
            )
            eos_at = torch.where(gen.any(1), gen.float().argmax(1), torch.full_like(eos_at, Tm))
            if bool((eos_at < Tm).all()) or (deadline and time.time() > deadline):
                break
        hb, ee, pp = buf.cpu().tolist(), eos_at.cpu().tolist(), pos.cpu().tolist()
        del graph, cache
    return [hb[b][lens[b] : min(ee[b], pp[b]) + (1 if ee[b] < Tm else 0)] for b in range(B)]
