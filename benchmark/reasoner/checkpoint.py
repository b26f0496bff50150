"""Checkpoints: the training state to resume from, and the Hugging Face folder that servers load."""

import json
import math
import os
import shutil
import tarfile

import synth
import torch
from model import LM
from safetensors.torch import load_file, save_file

CFG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
)


def write_json(path, value, indent=None):
    with open(path, "w") as f:
        json.dump(value, f, indent=indent)


def save_ckpt(a, model, opt, step, spent, toks):
    p = os.path.join(a.out, "ckpt.pt")
    torch.save({"model": model.state_dict(), "opt": opt.state()}, p + ".tmp")
    os.replace(p + ".tmp", p)
    write_json(
        os.path.join(a.out, "train_state.json"),
        {"step": step, "spent_s": spent, "tokens": toks, "minutes": a.minutes},
    )


def model_cfg(a):
    return {
        "vocab_size": synth.VOCAB_SIZE,
        "hidden_size": a.hidden,
        "intermediate_size": a.ff,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


def hf_config(c, **over):
    d = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "max_window_layers": c["num_hidden_layers"],
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": c["rope_theta"]},
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": synth.PAD,
        "eos_token_id": synth.IM_END,
        "pad_token_id": synth.PAD,
        "layer_types": ["full_attention"] * c["num_hidden_layers"],
    }
    d.update(c)
    d.update(over)
    return d


def write_shards(out, tensors, shard_bytes):
    """tensors: iterable of (name, tensor); returns the index. Streams, one shard in memory."""
    parts, cur, size, wmap, total = [], {}, 0, {}, 0

    def flush():
        nonlocal cur, size
        if cur:
            fn = f"part-{len(parts):05d}.tmp"
            save_file(cur, os.path.join(out, fn), metadata={"format": "pt"})
            parts.append((fn, list(cur)))
            cur, size = {}, 0

    for n, t in tensors:
        nb = t.numel() * t.element_size()
        if size + nb > shard_bytes:
            flush()
        cur[n] = t.contiguous().cpu()
        size += nb
        total += nb
    flush()
    for i, (fn, names) in enumerate(parts):
        new = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        os.replace(os.path.join(out, fn), os.path.join(out, new))
        for n in names:
            wmap[n] = new
    write_json(
        os.path.join(out, "model.safetensors.index.json"),
        {"metadata": {"total_size": total}, "weight_map": wmap},
        1,
    )
    return len(parts), total


def save_hf(c, sd, out, shard_mib=15.0):
    os.makedirs(out, exist_ok=True)
    for f in os.listdir(out):
        if f.startswith("model-") and f.endswith(".safetensors"):
            os.remove(os.path.join(out, f))
    total = sum(v.numel() * 2 for v in sd.values())
    lim = int(shard_mib * 2**20)
    lim = min(lim, max(total // max(1, math.ceil(total / lim)) + 2 * 2**20, 2 * 2**20))  # balanced
    n, tot = write_shards(out, ((k, v.to(torch.bfloat16)) for k, v in sd.items()), lim)
    write_json(os.path.join(out, "config.json"), hf_config(c), 1)
    write_json(
        os.path.join(out, "generation_config.json"),
        {
            "bos_token_id": synth.PAD,
            "eos_token_id": [synth.IM_END],
            "pad_token_id": synth.PAD,
            "do_sample": False,
        },
    )
    synth.save_tokenizer(out)
    print(f"saved {n} shards, {tot / 2**20:.1f} MiB", flush=True)


def pack(a):
    """<= 8 files of < 16 MiB: the shards and one meta.tgz with everything small."""
    os.makedirs(a.pack, exist_ok=True)
    shards = sorted(f for f in os.listdir(a.out) if f.startswith("model-") and f.endswith(".safetensors"))
    for f in shards:
        shutil.copy(os.path.join(a.out, f), os.path.join(a.pack, f))
    with tarfile.open(os.path.join(a.pack, "meta.tgz"), "w:gz") as t:
        for f in sorted(os.listdir(a.out)):
            fp = os.path.join(a.out, f)
            if (
                os.path.isfile(fp)
                and f not in shards
                and not f.endswith((".pt", ".tmp"))
                and os.path.getsize(fp) < 8 * 2**20
            ):
                t.add(fp, arcname=f)
    for f in sorted(os.listdir(a.pack)):
        print(f"pack {f} {os.path.getsize(os.path.join(a.pack, f)) / 2**20:.2f} MiB", flush=True)


def load_hf(src, dev, dtype):
    """The checkpoint in folder `src` as an LM. Raises FileNotFoundError when it holds none."""
    with open(os.path.join(src, "config.json")) as f:
        cfg = json.load(f)
    c = {k: cfg[k] for k in CFG_KEYS}
    model = LM(c, dtype)
    sd = {}
    for f in sorted(os.listdir(src)):
        if f.startswith("model-") and f.endswith(".safetensors"):
            sd.update(load_file(os.path.join(src, f)))
    if not sd:
        raise FileNotFoundError(
            f"{src} holds no model-*.safetensors. Give the folder of a trained checkpoint."
        )
    model.load_state_dict(sd)
    return model.to(device=dev, dtype=dtype).eval()
