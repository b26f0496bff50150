"""The training loop. Learning rate, curriculum and stop follow wall-clock, so a run ends on time."""

import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from checkpoint import model_cfg, save_ckpt, save_hf, write_json
from data import read_train_state
from model import LAYER_FN, LM, pick_sdpa, plain_layer
from optim import MuonAdam, lr_mult
from synth import FAMS


class Meter:
    """Loss and error rate by family since the last report. Sums stay on the device until report() reads them."""

    def __init__(self, dev, toks):
        self.loss, self.count, self.hits = (torch.zeros(len(FAMS), device=dev) for _ in range(3))
        self.dev, self.log = dev, []
        self._reset(toks)

    def _reset(self, toks):
        for total in (self.loss, self.count, self.hits):
            total.zero_()
        self.since, self.tok_since, self.lengths, self.wait = time.time(), toks, [], 0.0

    @torch.no_grad()
    def add(self, length, fam, ce, hit):
        self.lengths.append(length)
        self.loss.index_add_(0, fam, ce.detach())
        self.count.index_add_(0, fam, torch.ones_like(ce))
        self.hits.index_add_(0, fam, hit.float())

    def report(self, step, p, spent, toks):
        """Print and keep one line, start afresh; returns the mean loss."""
        fl, fc, fh = self.loss.cpu(), self.count.cpu().clamp(min=1), self.hits.cpu()  # waits for the device
        tps = (toks - self.tok_since) / max(1e-9, time.time() - self.since)
        fam = {f: [(fl[i] / fc[i]).item(), (1 - fh[i] / fc[i]).item()] for i, f in enumerate(FAMS)}
        mean = (fl.sum() / fc.sum()).item()
        mem = torch.cuda.max_memory_allocated() / 2**30 if self.dev.type == "cuda" else 0
        print(
            f"step {step} p {p:.3f} t {spent:.0f}s tok {toks / 1e6:.1f}M {tps / 1e3:.0f}k tok/s loss {mean:.4f} "
            f"lr {lr_mult(p):.3f} T {min(self.lengths)}-{max(self.lengths)} wait {self.wait:.1f}s mem {mem:.0f}G | "
            + " ".join(f"{f}:{loss:.4f}/{err * 100:.2f}%" for f, (loss, err) in fam.items()),
            flush=True,
        )
        entry = {"step": step, "p": p, "t": spent, "tokens": toks, "tps": tps, "loss": mean}
        self.log.append({**entry, "T": max(self.lengths), "fam": fam})
        self._reset(toks)
        return mean


def to_device(batch, dev):
    """A batch of Feed.get() as (ids (B, T), indices of the predicted positions in (B, T-1), their families)."""
    T, ids, st, ln, fm = batch
    ids = torch.from_numpy(ids.astype(np.int32))
    pos = torch.arange(T - 1)[None]
    st, ln = torch.from_numpy(st)[:, None], torch.from_numpy(ln)[:, None]
    mask = (pos + 1 >= st) & (pos + 1 < ln)  # predict completion tokens only
    idx = mask.flatten().nonzero().squeeze(1)
    fam = torch.from_numpy(fm).long()[(idx // (T - 1)).to(torch.int64)]
    if dev.type == "cuda":
        ids, idx, fam = (x.pin_memory().to(dev, non_blocking=True) for x in (ids, idx, fam))
    return ids.long(), idx, fam


def start(a):
    """Device, config, model, optimiser and state of a new or resumed run."""
    dev = torch.device("cuda" if torch.cuda.is_available() and not a.cpu else "cpu")
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    c = model_cfg(a)
    model = LM(c, torch.bfloat16 if dev.type == "cuda" else torch.float32).to(dev)
    npar = sum(p.numel() for p in model.parameters())
    print(f"model {npar / 1e6:.2f}M params, device {dev}, {a.workers} workers", flush=True)
    pick_sdpa(dev, c)
    if a.compile:
        torch._dynamo.config.cache_size_limit = 64
        LAYER_FN[0] = torch.compile(plain_layer, dynamic=True)
    opt = MuonAdam(model, a)
    state = read_train_state(a)
    if state["step"]:
        ck = torch.load(os.path.join(a.out, "ckpt.pt"), map_location=dev, weights_only=True)
        model.load_state_dict(ck["model"])
        opt.load(ck["opt"])
        print(f"resumed at step {state['step']}, {state['spent_s']:.0f} s spent", flush=True)
    return dev, c, model, opt, state


def train_step(a, model, opt, batch, p, dev):
    """One optimiser step; returns (tokens in the batch, families, cross entropies, hits)."""
    ids, idx, fam = to_device(batch, dev)
    h = model.hidden(ids)
    h = h[:, :-1].reshape(-1, h.shape[-1])[idx]
    tgt = ids[:, 1:].reshape(-1)[idx]
    lg = model.logits(h).float()
    ce = F.cross_entropy(lg, tgt, reduction="none")
    loss = ce.mean()
    if a.zloss:
        loss = loss + a.zloss * torch.logsumexp(lg, -1).square().mean()
    loss.backward()
    opt.step(lr_mult(p))
    return int(ids.numel()), fam, ce, lg.argmax(-1) == tgt


def train(a, feed):
    """Train until the schedule or the session ends, then save to `a.out`; returns the model."""
    os.makedirs(a.out, exist_ok=True)
    dev, c, model, opt, state = start(a)
    step, spent0, toks = state["step"], state["spent_s"], state["tokens"]
    first, total, t0 = step + 1, a.minutes * 60, time.time()
    limit = min(total - spent0, (a.session_minutes or 1e9) * 60)
    meter, last_save = Meter(dev, toks), time.time()
    while True:
        spent = spent0 + time.time() - t0
        p = min(1.0, spent / total) if not a.steps else min(1.0, step / a.steps)
        feed.progress.value = p
        if step >= a.steps if a.steps else time.time() - t0 >= limit:
            break
        asked = time.time()
        batch = feed.get()
        meter.wait += time.time() - asked
        n, fam, ce, hit = train_step(a, model, opt, batch, p, dev)
        step, toks = step + 1, toks + n
        meter.add(batch[0], fam, ce, hit)
        if (step % a.log_every == 0 or step == first) and not math.isfinite(
            meter.report(step, p, spent, toks)
        ):
            print("loss is not finite, stopping", flush=True)
            break
        if time.time() - last_save > a.save_every:
            save_ckpt(a, model, opt, step, spent0 + time.time() - t0, toks)
            last_save = time.time()
    feed.stop()
    spent = spent0 + time.time() - t0
    save_ckpt(a, model, opt, step, spent, toks)
    write_json(os.path.join(a.out, "train_log.json"), meter.log)
    save_hf(c, {k: v.detach() for k, v in model.state_dict().items()}, a.out, a.shard_mib)
    print(
        f"trained {step} steps, {toks / 1e6:.1f}M tokens, {spent:.0f} s; HF checkpoint in {a.out}", flush=True
    )
    return model
