"""Sparse self-speculation and prompt lookup, simulated: how many drafts would a verification accept?"""

import time

import numpy as np
import synth
import torch
import torch.nn.functional as F
from generate import Cache, prefill


def _full_step(model, cache, toks, n, want_probs):
    """toks (B,t) at positions n..n+t-1 with full attention over the cache (which is written).
    Returns logits (B,t,V) and, per layer, probs averaged over queries: (B,Hkv,G,Tmax) summed per query."""
    dev = toks.device
    B, t = toks.shape
    Tm = cache.T
    pos = n[:, None] + torch.arange(t, device=dev)[None]
    cs, sn = model.cs(Tm + 64, dev)
    cos, sin = cs[pos][:, :, None], sn[pos][:, :, None]
    ar = torch.arange(Tm, device=dev)
    mask = ar[None, None] <= pos[..., None]  # B,t,Tm
    bi = torch.arange(B, device=dev)[:, None].expand(B, t)
    x = F.embedding(toks, model.model.embed_tokens.weight).to(model.dt)
    Hk, D = model.c["num_key_value_heads"], model.c["head_dim"]
    probs = []
    for li, layer in enumerate(model.model.layers):
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
        cache.k[li][bi, :, pos] = k.transpose(1, 2)
        cache.v[li][bi, :, pos] = v.transpose(1, 2)
        qg = q.reshape(B, Hk, -1, t, D)
        s = torch.einsum("bhgtd,bhsd->bhgts", qg, cache.k[li]).float() * D**-0.5
        s = s.masked_fill(~mask[:, None, None], float("-inf"))
        p = torch.softmax(s, -1)
        o = torch.einsum("bhgts,bhsd->bhgtd", p.to(model.dt), cache.v[li])
        o = o.reshape(B, -1, t, D).transpose(1, 2).reshape(B, t, -1)
        x = x + layer.self_attn.o_proj(o)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if want_probs:
            probs.append(p)
    return model.logits(model.model.norm(x)), probs


def _draft_step(model, sel, draft, tok, pos, i):
    """One token (B,) attends to the selected entries and to the draft buffer [0..i]."""
    B = tok.shape[0]
    cs, sn = model._rope
    cos, sin = cs[pos][:, None, None], sn[pos][:, None, None]
    Hk, D = model.c["num_key_value_heads"], model.c["head_dim"]
    x = F.embedding(tok[:, None], model.model.embed_tokens.weight).to(model.dt)
    for li, layer in enumerate(model.model.layers):
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), cos, sin)
        draft[li][0][:, :, i] = k[:, :, 0]
        draft[li][1][:, :, i] = v[:, :, 0]
        ks, vs, valid = sel[li]
        qg = q.reshape(B, Hk, -1, D)
        s1 = torch.einsum("bhgd,bhsd->bhgs", qg, ks).float().masked_fill(~valid[:, :, None], float("-inf"))
        s2 = torch.einsum("bhgd,bhsd->bhgs", qg, draft[li][0][:, :, : i + 1]).float()
        p = torch.softmax(torch.cat([s1, s2], -1) * D**-0.5, -1).to(model.dt)
        S = ks.shape[2]
        o = torch.einsum("bhgs,bhsd->bhgd", p[..., :S], vs) + torch.einsum(
            "bhgs,bhsd->bhgd", p[..., S:], draft[li][1][:, :, : i + 1]
        )
        x = x + layer.self_attn.o_proj(o.reshape(B, 1, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.logits(model.model.norm(x[:, 0])).argmax(-1)


def _select(model, cache, score, n, policy, ratio, minb, recent, maxsel):
    """score: per layer (B,Hsel,Tm) or None. Keys < n are eligible. Returns per-layer
    (K,V,valid) gathered and boolean masks (B,Hsel,Tm)."""
    B, Tm = n.shape[0], cache.T
    dev = n.device
    Hk = model.c["num_key_value_heads"]
    ar = torch.arange(Tm, device=dev)
    bud = torch.clamp((ratio * n.float()).ceil().long(), min=minb)
    bud = torch.minimum(bud, n)
    S = int(bud.max())
    res, masks = [], []
    for li in range(len(cache.k)):
        if policy == "full":
            sc = ar.float()[None, None].expand(B, 1, Tm)
            bud_, S_ = n, int(n.max())
        elif policy == "window":
            sc = ar.float()[None, None].expand(B, 1, Tm) + (ar < 4).float()[None, None] * 1e9
            bud_, S_ = bud, S
        else:
            sc = score[li] + (ar[None, None] >= (n - recent)[:, None, None]).float() * 1e9
            bud_, S_ = bud, S
        sc = sc.masked_fill(ar[None, None] >= n[:, None, None], -1.0)
        idx = sc.topk(min(S_, Tm), -1).indices  # B,H,S
        valid = torch.arange(idx.shape[-1], device=dev)[None, None] < bud_[:, None, None]
        valid = valid.expand_as(idx)
        m = torch.zeros(sc.shape, dtype=torch.bool, device=dev)
        m.scatter_(2, idx, valid)
        masks.append(m)
        e = idx.expand(B, Hk, idx.shape[-1])[..., None].expand(-1, -1, -1, cache.k[li].shape[-1])
        res.append((cache.k[li].gather(2, e), cache.v[li].gather(2, e), valid.expand(B, Hk, idx.shape[-1])))
    return res, masks


def specsim(
    model,
    docs,
    starts,
    rounds,
    dev,
    k=8,
    policy="pillar",
    ratio=0.05,
    minb=64,
    head_mode="layer",
    recent=8,
    queries="all",
    kept=True,
    deadline=None,
):
    """Greedy sparse self-speculation. docs: token lists; each sequence is forced up to starts[b]
    tokens (gold text) and then decodes by itself. head_mode 'layer': scores averaged over all
    heads, one selection per layer; 'kv': one selection per layer and KV head (as the paper's code).
    queries 'all': the k+1 verified positions are averaged; 'acc': only the accepted ones."""
    with torch.no_grad():
        B = len(docs)
        Tm = -(-(max(starts) + rounds * (k + 1) + 2 * k + 8) // 64) * 64
        cache = Cache(model, B, Tm, dev)
        model.cs(Tm + 64, dev)
        L = len(cache.k)
        n0 = [s - (k + 1) for s in starts]
        prefill(model, cache, [d[:x] for d, x in zip(docs, n0)], dev)
        n = torch.tensor(n0, device=dev)
        toks = torch.tensor([d[x : x + k + 1] for d, x in zip(docs, n0)], device=dev)
        lg, probs = _full_step(model, cache, toks, n, True)
        acc_q = torch.full((B,), k + 1, device=dev)
        n = n + k + 1
        pend = lg[:, -1].argmax(-1)
        outs = [[int(x)] for x in pend.tolist()]
        alive = torch.ones(B, dtype=torch.bool, device=dev)
        accs, kept_sum, kept_n, win_sum, orc_sum = [], torch.zeros(L), 0, torch.zeros(L), torch.zeros(L)
        budgets = []
        Hk, D = model.c["num_key_value_heads"], model.c["head_dim"]

        def scores(probs, nq):
            o = []
            t = probs[0].shape[3]
            w = (
                torch.ones(B, t, device=dev)
                if queries == "all"
                else (torch.arange(t, device=dev)[None] < nq[:, None]).float()
            )
            for p in probs:
                s = torch.einsum("bhgts,bt->bhgs", p, w).mean(2)
                o.append(s.mean(1, keepdim=True) if head_mode == "layer" else s)
            return o

        for rd in range(rounds):
            sc = scores(probs, acc_q) if policy == "pillar" else None
            sel, masks = _select(model, cache, sc, n, policy, ratio, minb, recent, 0)
            budgets.append(float(masks[0][:, 0].sum(-1).float().mean()))
            draft = [
                [torch.zeros(B, Hk, k, D, device=dev, dtype=model.dt) for _ in range(2)] for _ in range(L)
            ]
            cur, ds = pend, []
            for i in range(k):
                cur = _draft_step(model, sel, draft, cur, n + i, i)
                ds.append(cur)
            ds = torch.stack(ds, 1)  # B,k
            lg, probs = _full_step(model, cache, torch.cat([pend[:, None], ds], 1), n, True)
            tgt = lg.argmax(-1)  # B,k+1
            ok = (ds == tgt[:, :k]).long().cumprod(1)
            a_ = ok.sum(1)
            if kept and policy in ("pillar", "window"):
                ar = torch.arange(Tm, device=dev)
                newk = ar[None, None] >= n[:, None, None]
                wq = (torch.arange(k + 1, device=dev)[None] <= a_[:, None]).float() * alive[:, None]
                wm = wq.sum()
                if float(wm) > 0:
                    for li in range(L):
                        p = probs[li]
                        m = (masks[li] | newk).float()
                        m = m.expand(B, Hk, Tm)
                        pm = torch.einsum("bhgts,bhs->bhgt", p, m).mean((1, 2))
                        kept_sum[li] += float((pm * wq).sum() / wm)
                        bud = masks[li].sum(-1).float().mean(1)
                        wmask = (
                            ((ar[None] >= (n - bud.long())[:, None]) | (ar[None] < 4))
                            .float()[:, None]
                            .expand(B, Hk, Tm)
                        )
                        pw = torch.einsum("bhgts,bhs->bhgt", p, wmask).mean((1, 2))
                        win_sum[li] += float((pw * wq).sum() / wm)
                        ps = torch.einsum("bhgts,bt->bs", p, wq) / (
                            p.shape[1] * p.shape[2]
                        )  # head average of these queries
                        ps = ps.masked_fill(ar[None] >= n[:, None], 0)
                        kk = int(bud.max())
                        top = ps.topk(kk, -1).values.sum(-1)
                        newm = torch.einsum("bhgts,bs->bhgt", p, newk[:, 0].float()).mean((1, 2))
                        orc_sum[li] += float((top.sum() + (newm * wq).sum()) / wm)
                    kept_n += 1
            bonus = tgt.gather(1, a_[:, None])[:, 0]
            al = alive.tolist()
            for b, (x, row, bn) in enumerate(zip(a_.tolist(), ds.tolist(), bonus.tolist())):
                if al[b]:
                    new = row[:x] + [bn]
                    if synth.IM_END in new:
                        outs[b] += new[: new.index(synth.IM_END) + 1]
                        alive[b] = False  # this last round is not counted
                    else:
                        accs.append((b, rd, x))
                        outs[b] += new
            n = torch.where(alive, n + a_ + 1, n)
            pend = torch.where(alive, bonus, pend)
            acc_q = a_ + 1
            if not bool(alive.any()) or (deadline and time.time() > deadline):
                break
        per = [[] for _ in range(B)]
        for b, _, x in accs:
            per[b].append(x)
        res = {
            "policy": policy,
            "ratio": ratio,
            "min": minb,
            "head_mode": head_mode,
            "recent": recent,
            "queries": queries,
            "k": k,
            "rounds": len(accs),
            "mean_accepted": float(np.mean([x for *_, x in accs])) if accs else None,
            "mean_budget": float(np.mean(budgets)) if budgets else 0.0,
            "hist": np.bincount([x for *_, x in accs], minlength=k + 1).tolist() if accs else [],
        }
        if kept_n:
            res["kept_by_layer"] = [round(float(x), 4) for x in kept_sum / kept_n]
            res["window_kept_by_layer"] = [round(float(x), 4) for x in win_sum / kept_n]
            res["oracle_kept_by_layer"] = [round(float(x), 4) for x in orc_sum / kept_n]
        return res, per, outs


def ngram_sim(ctx, out, k=8, nmax=4):
    """Prompt-lookup drafting along a fixed greedy text. Returns accepted counts."""
    seq = list(ctx)
    tab = {}

    def add(i):  # n-grams that end before position i map to i
        for m in range(1, nmax + 1):
            if i >= m:
                tab[tuple(seq[i - m : i])] = i

    for i in range(1, len(seq)):
        add(i)
    acc, i = [], 0
    while i < len(out):
        cand = []
        for m in range(nmax, 0, -1):
            j = tab.get(tuple(seq[-m:])) if len(seq) >= m else None
            if j is not None:
                cand = seq[j : j + k]
                break
        a_ = 0
        while a_ < len(cand) and i + a_ < len(out) and cand[a_] == out[i + a_]:
            a_ += 1
        if i + a_ + 1 > len(out):
            break
        acc.append(a_)
        for x in out[i : i + a_ + 1]:
            seq.append(x)
            add(len(seq) - 1)
        i += a_ + 1
    return acc
