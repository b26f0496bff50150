"""The Qwen3 architecture in plain torch, small enough to read, and the choice of attention kernel for it."""

import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def plain_layer(layer, x, cos, sin):
    return layer(x, cos, sin)


LAYER_FN = [plain_layer]  # what LM.hidden calls for each layer; training may put a compiled one here
SDPA = {"mode": "gqa", "backend": None}


def sdpa(q, k, v):
    if SDPA["backend"] is not None:
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(SDPA["backend"]):
            return _plain_sdpa(q, k, v)
    return _plain_sdpa(q, k, v)


def _plain_sdpa(q, k, v):
    if SDPA["mode"] == "gqa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    g = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), is_causal=True
    )


def pick_sdpa(dev, c, T=4096):
    """Times the SDPA back ends forward+backward and pins the fastest one that is right."""
    if dev.type != "cuda":
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    Hq, Hk, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    torch.manual_seed(0)
    q0, k0, v0 = (
        torch.randn(8, T, h, D, device=dev, dtype=torch.bfloat16).transpose(1, 2) for h in (Hq, Hk, Hk)
    )
    ref, best = None, None
    for name, be in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("eff", SDPBackend.EFFICIENT_ATTENTION),
    ):
        for mode in ("gqa", "rep"):
            try:
                SDPA["mode"] = mode
                q, k, v = (x.detach().requires_grad_() for x in (q0, k0, v0))
                with sdpa_kernel(be):
                    for i in range(4):
                        if i == 1:
                            torch.cuda.synchronize()
                            t0 = time.time()
                        o = _plain_sdpa(q, k, v)
                        o.backward(o.detach(), retain_graph=False)
                torch.cuda.synchronize()
                dt = (time.time() - t0) / 3
                g = k.grad.float().norm().item()
                if ref is None:
                    ref = (o.float().norm().item(), g)
                ok = abs(o.float().norm().item() / ref[0] - 1) < 2e-2 and abs(g / ref[1] - 1) < 2e-2
                fl = 3.5 * 4 * 8 * Hq * T * T * D / 2 / dt / 1e12
                print(f"sdpa {name}/{mode}: {dt * 1e3:.2f} ms fwd+bwd {fl:.0f} TFLOP/s ok={ok}", flush=True)
                if ok and (best is None or dt < best[0]):
                    best = (dt, name, mode, be)
            except RuntimeError as e:  # a kernel that this GPU or shape does not have
                print(f"sdpa {name}/{mode}: not usable ({str(e).splitlines()[0][:80]})", flush=True)
    if best is None:
        SDPA["mode"] = "rep"
        print("sdpa: no back end passed the check, torch chooses", flush=True)
        return
    _, name, mode, be = best
    SDPA["mode"], SDPA["backend"] = mode, be
    print(f"sdpa: using {name}/{mode}", flush=True)


class Norm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Lin(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(o, i))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        d, D = c["hidden_size"], c["head_dim"]
        self.q_proj = Lin(d, c["num_attention_heads"] * D)
        self.k_proj = Lin(d, c["num_key_value_heads"] * D)
        self.v_proj = Lin(d, c["num_key_value_heads"] * D)
        self.o_proj = Lin(c["num_attention_heads"] * D, d)
        self.q_norm = Norm(D, c["rms_norm_eps"])
        self.k_norm = Norm(D, c["rms_norm_eps"])

    def qkv(self, x, cos, sin):
        """x (B,T,d); cos/sin (.., T, D/2) -> q (B,Hq,T,D), k, v (B,Hkv,T,D)"""
        c = self.c
        B, T, _ = x.shape
        D, Hq, Hk = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        w = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype)
        y = F.linear(x, w).view(B, T, Hq + 2 * Hk, D)
        q, k, v = y.split([Hq, Hk, Hk], dim=2)
        q = rope(self.q_norm(q), cos, sin).transpose(1, 2)
        k = rope(self.k_norm(k), cos, sin).transpose(1, 2)
        return q, k, v.transpose(1, 2)


def rope(x, cos, sin):
    """x (B,T,H,D), cos/sin broadcastable (1|B,T,1,D/2); halves rotated as in HF Qwen3"""
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = Lin(d, f), Lin(d, f), Lin(f, d)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attn(c), MLP(c)
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, cos, sin):
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        o = sdpa(q, k, v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        x = x + self.self_attn.o_proj(o)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])


class LM(nn.Module):
    """Parameter names are those of Qwen3ForCausalLM (tied lm_head)."""

    def __init__(self, c, dtype):
        super().__init__()
        self.c, self.dt = c, dtype
        self.model = Body(c)
        self._rope = None
        for n, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 if "embed" in n else 0.7 / math.sqrt(p.shape[1])
                if "o_proj" in n or "down_proj" in n:
                    std /= math.sqrt(2 * c["num_hidden_layers"])
                nn.init.normal_(p, std=std)

    def cs(self, T, device):
        if self._rope is None or self._rope[0].shape[0] < T or self._rope[0].device != device:
            n = max(T, 2048)
            inv = self.c["rope_theta"] ** (
                -torch.arange(0, self.c["head_dim"], 2, dtype=torch.float64) / self.c["head_dim"]
            )
            ang = torch.outer(torch.arange(n, dtype=torch.float64), inv)
            self._rope = (
                ang.cos().to(device=device, dtype=self.dt),
                ang.sin().to(device=device, dtype=self.dt),
            )
        return self._rope

    def hidden(self, ids):
        cos, sin = self.cs(ids.shape[1], ids.device)
        cos, sin = cos[None, : ids.shape[1], None], sin[None, : ids.shape[1], None]
        x = F.embedding(ids, self.model.embed_tokens.weight).to(self.dt)
        f = LAYER_FN[0]
        for layer in self.model.layers:
            x = f(layer, x, cos, sin)
        return self.model.norm(x)

    def logits(self, h):
        return F.linear(h, self.model.embed_tokens.weight.to(h.dtype))
