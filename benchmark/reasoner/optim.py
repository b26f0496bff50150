"""Muon for the matrices of the layers, AdamW for the rest, and the learning-rate schedule."""

import torch


class MuonAdam:
    """Muon for the 2-D weights of the layers, AdamW for embeddings and norm scales."""

    def __init__(self, model, a):
        self.a = a
        self.mu, self.ad = {}, []
        for n, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in n and not a.adamw:
                self.mu.setdefault(tuple(p.shape), []).append(p)
            else:
                lr = a.lr_embed if "embed" in n else (a.lr_norm if p.dim() == 1 else a.lr_adamw)
                self.ad.append((p, lr))
        self.mom = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.mu.items()}
        self.m = [torch.zeros_like(p) for p, _ in self.ad]
        self.v = [torch.zeros_like(p) for p, _ in self.ad]
        self.t = 0

    def state(self):
        return {"mom": self.mom, "m": self.m, "v": self.v, "t": self.t}

    def load(self, s):
        for k in self.mom:
            self.mom[k].copy_(s["mom"][k])
        for i in range(len(self.m)):
            self.m[i].copy_(s["m"][i])
            self.v[i].copy_(s["v"][i])
        self.t = s["t"]

    @staticmethod
    def ns(G, dt, steps=5):
        a, b, c = 3.4445, -4.7750, 2.0315
        X = G.to(dt)
        tr = X.shape[-2] > X.shape[-1]
        if tr:
            X = X.mT
        X = X / (X.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dt)
        for _ in range(steps):
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
        return X.mT if tr else X

    def step(self, mult):
        a = self.a
        self.t += 1
        mom = 0.85 + 0.10 * min(1.0, self.t / 300)
        with torch.no_grad():
            for s, ps in self.mu.items():
                g = torch.stack([p.grad for p in ps])
                buf = self.mom[s]
                buf.lerp_(g, 1 - mom)
                u = self.ns(torch.lerp(g, buf, mom), torch.bfloat16 if g.is_cuda else torch.float32).to(
                    g.dtype
                )
                lr = a.lr_muon * mult * max(1.0, s[0] / s[1]) ** 0.5
                torch._foreach_mul_(ps, 1 - a.lr_muon * mult * a.wd)
                torch._foreach_add_(ps, list(u.unbind(0)), alpha=-lr)
            ps = [p for p, _ in self.ad]
            gs = [p.grad for p in ps]
            torch._foreach_lerp_(self.m, gs, 1 - 0.9)
            torch._foreach_mul_(self.v, 0.95)
            torch._foreach_addcmul_(self.v, gs, gs, 1 - 0.95)
            c1, c2 = 1 - 0.9**self.t, 1 - 0.95**self.t
            for (p, lr), m, v in zip(self.ad, self.m, self.v):
                p.addcdiv_(m, (v / c2).sqrt_().add_(1e-10), value=-lr * mult / c1)
                p.grad = None
            for qs in self.mu.values():
                for p in qs:
                    p.grad = None


def lr_mult(p):
    """warm-up 1.5 %, flat to 50 %, then linear to 2 %"""
    if p < 0.015:
        return 0.05 + 0.95 * p / 0.015
    return 1.0 if p < 0.5 else max(0.02, 1 - 0.98 * (p - 0.5) / 0.5)
