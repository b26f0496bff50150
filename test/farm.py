"""Real servers for tests: started ahead of the test that needs them, few at a time, and always ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from sglang_sparsespec._server import HOST, ServerProcess, free_port
from sglang_sparsespec.demo import find_device

ASSETS = Path(__file__).resolve().parents[1] / "python/sglang_sparsespec/assets"
REASONER = ASSETS / "reasoner-5m"
READY_S = 420
# SGLang's kernels there take 16 bits. Room for other servers on the same GPU, and graphs for few requests,
# which are captured faster.
SMALL_ON_A_GPU = (
    "--dtype", "bfloat16", "--mem-fraction-static", "0.4", "--max-total-tokens", "60000",
    "--max-running-requests", "32", "--cuda-graph-max-bs-decode", "32",
    "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One server. `config` None: without speculation."""

    name: str
    model: str  # "reasoner", "qwen3" or "llama"
    config: str | None = None  # JSON of SGLANG_SPARSESPEC_CONFIG
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def stride(self) -> int:
        return json.loads(self.config or "{}").get("stride", 8)


@dataclass
class Farm:
    """Hands out running servers in the order of `plan`; the next one starts while tests use the current
    one."""

    plan: list[Spec]
    models: dict[str, Path]
    logs: Path
    _starting: dict[str, threading.Thread] = field(default_factory=dict)
    _servers: dict[str, ServerProcess] = field(default_factory=dict)
    _errors: dict[str, BaseException] = field(default_factory=dict)

    def get(self, name: str) -> ServerProcess:
        """The running server `name`. Servers that stand before it in the plan are ended."""
        at = next(i for i, spec in enumerate(self.plan) if spec.name == name)
        for spec in self.plan[:at]:
            self._stop(spec.name)
        for spec in self.plan[at : at + 2]:
            self._start(spec)
        self._starting[name].join()
        if name in self._errors:
            raise self._errors[name]
        return self._servers[name]

    def stop_all(self) -> None:
        for spec in self.plan:
            self._stop(spec.name)

    def _start(self, spec: Spec) -> None:
        if spec.name in self._starting:
            return
        thread = threading.Thread(target=self._run, args=(spec,), daemon=True)
        self._starting[spec.name] = thread
        thread.start()

    def _run(self, spec: Spec) -> None:
        server = make_server(
            self.models[spec.model],
            self.logs / f"{spec.name}.log",
            config=spec.config,
            args=spec.args,
            env=dict(spec.env),
        )
        self._servers[spec.name] = server
        try:
            server.start()
            server.wait_ready()
        except BaseException as error:
            self._errors[spec.name] = error

    def _stop(self, name: str) -> None:
        if name in self._starting:
            self._starting[name].join()
            if name in self._servers:
                self._servers.pop(name).stop()


def make_server(
    model: Path,
    log: Path,
    *,
    config: str | None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ServerProcess:
    """A server that is not started yet. config: JSON of SPARSESPEC's; None: without speculation."""
    flags = ["--random-seed", "1", "--skip-server-warmup"]
    flags += SMALL_ON_A_GPU if find_device() == "cuda" else ("--dtype", "float32")
    flags += args  # the last of two of a name is taken
    # Without dynamo: SGLang compiles a helper of tensor-parallel embeddings, a minute of C++ here.
    env = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **(env or {})}
    if config is not None:
        flags += ["--speculative-algorithm", "SPARSESPEC"]
        env["SGLANG_SPARSESPEC_CONFIG"] = config
    return ServerProcess(model, flags, env=env, log_path=log, timeout_s=READY_S)


def generate(server: ServerProcess, prompts: Sequence[Sequence[int]], **params: Any) -> list[dict[str, Any]]:
    """Answer all `prompts` (token ids) at once, greedily unless told otherwise. Raises on any error
    status."""
    beside = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    extra = {key: params.pop(key) for key in beside if key in params}
    sampling = {"temperature": 0, "ignore_eos": True, **params}
    if isinstance(params.get("max_new_tokens"), list):
        sampling = [{**sampling, "max_new_tokens": n} for n in params["max_new_tokens"]]
    payload = {"input_ids": [list(p) for p in prompts], "sampling_params": sampling, **extra}
    reply = requests.post(f"{server.url}/generate", json=payload, timeout=400)
    assert reply.status_code == 200, reply.text[:500]
    return reply.json()


def parted(server: ServerProcess, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """How far apart the two likeliest log-probabilities are where two outputs part, by `server`; 0 where they
    are equal. Where they part at another token than these two, it is infinite."""
    if list(ours) == list(theirs):
        return 0.0
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return float("inf")  # one ends earlier
    start = [*prompt, *theirs[:at]]
    reply = generate(server, [start], max_new_tokens=1, return_logprob=True, top_logprobs_num=2)[0]
    best, second = reply["meta_info"]["output_top_logprobs"][0]
    return best[0] - second[0] if {best[1], second[1]} == {ours[at], theirs[at]} else float("inf")


def generate_with(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to one body of /generate. Raises on any error status."""
    reply = requests.post(f"{server.url}/generate", json=body, timeout=400)
    assert reply.status_code == 200, reply.text[:500]
    return reply.json()


def update_weights(server: ServerProcess, model: Path) -> None:
    """Let a running server take the weights of `model`. Raises where it does not."""
    update = {"model_path": str(model)}
    reply = requests.post(f"{server.url}/update_weights_from_disk", json=update, timeout=120)
    assert reply.status_code == 200 and reply.json()["success"], reply.text[:300]


class Trainer:
    """Rank 0 of a process group that sends weights to a running server, as a trainer does.

    Args:
        ranks: tensor-parallel ranks of the server.
    """

    def __init__(self, server: ServerProcess, *, ranks: int = 1) -> None:
        self._server, self._name, self._size = server, "trainer", 1 + ranks

    def __enter__(self) -> Trainer:
        from datetime import timedelta

        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        group = {"world_size": self._size, "group_name": self._name, "backend": "gloo"}
        address = {"master_address": HOST, "master_port": port, "rank_offset": 1}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.post, "init_weights_update_group", **group, **address)
            self._group = init_custom_process_group(
                init_method=f"tcp://{HOST}:{port}", rank=0, timeout=timedelta(seconds=60), **group
            )
            assert joined.result().status_code == 200, joined.result().text
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        self.post("destroy_weights_update_group", group_name=self._name)
        torch.distributed.destroy_process_group(self._group)

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(f"{self._server.url}/{path}", json=body, timeout=120)

    def send(self, tensors: Sequence[tuple[str, Any]], **options: Any) -> requests.Response:
        """The reply to an update by these tensors, which must be in a session."""
        import torch

        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self._name,
            **options,
        }
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.post, "update_weights_from_distributed", **body)
            for _, tensor in tensors:
                torch.distributed.broadcast(tensor, src=0, group=self._group)
            return reply.result()

    def update(self, model: Path, *, parts: int = 2, **options: Any) -> None:
        """Let the server take the weights of `model`, some at a time. Raises where it does not."""
        from safetensors.torch import load_file

        tensors = [pair for file in sorted(model.glob("*.safetensors")) for pair in load_file(file).items()]
        replies = [self.post("begin_weight_update")]
        replies += [self.send(tensors[part::parts], **options) for part in range(parts)]
        replies += [self.post("end_weight_update")]
        for reply in replies:
            assert reply.status_code == 200 and reply.json()["success"], reply.text[:300]


def internal_state(server: ServerProcess) -> dict[str, Any]:
    return requests.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]


def wait_until_idle(server: ServerProcess) -> None:
    """Raises AssertionError where it still serves after two minutes."""
    for _ in range(240):
        load = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]
        if load["num_running_reqs"] == load["num_waiting_reqs"] == 0:
            time.sleep(1)  # SGLang checks its pool for leaks whenever it idles, and ends itself on one
            assert requests.get(f"{server.url}/health", timeout=30).status_code == 200
            return
        time.sleep(0.5)
    raise AssertionError("the server did not become idle")


def make_random_model(path: Path, kind: str, seed: int) -> Path:
    """A tiny model with random weights. kind: "qwen3" or "llama"."""
    shape = {
        "vocab_size": 896,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "llama" else 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return make_model(path, {"qwen3": "Qwen3Config", "llama": "LlamaConfig"}[kind], shape, seed=seed)


def other_weights(path: Path, seed: int) -> Path:
    """The reasoner after a few steps of a training that led nowhere."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(REASONER, path)
    torch.manual_seed(seed)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            noise = torch.randn(weight.shape) * weight.float().std() * 0.5
            weights[name] = (weight.float() + (noise if weight.ndim == 2 else 0)).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return path


def make_model(path: Path, kind: str, shape: dict[str, Any], *, seed: int) -> Path:
    """A model of a configuration class of transformers with random weights, wide enough that its logits are
    far apart, and the reasoner's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.35 if "lm_head" in name else 0.6 / weight.shape[-1] ** 0.5)
            elif "sinks" in name:
                weight.normal_(2, 1)
    model.save_pretrained(path)
    for part in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / part).write_bytes((REASONER / part).read_bytes())
    return path
