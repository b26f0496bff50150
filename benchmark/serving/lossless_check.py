"""Does SPARSESPEC answer as the model alone does? One server without it, then one for every variant.

    cd benchmark/serving
    python lossless_check.py --model-path DIR --prompts ../reasoner/prompts-2k.jsonl --out R.json

For every variant: answers right, token ids equal to those without speculation, acceptance length, tokens/s.
In bfloat16 two correct servers may part at near ties, so where they part the server is asked for the
log-probabilities of the two most likely tokens, and their difference is reported. Then a storm of concurrent
requests of which many are aborted, after which the first prompts must still give the same ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from cell import flush, get_info, get_load
from sglang_sparsespec._client import Outcome, answer_all, encode_prompts, load_problems
from sglang_sparsespec._server import ServerProcess

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "pillar": {},
    "pillar-kv_head": {"index_scope": "kv_head"},
    "pillar-unified": {"schedule": "unified"},
    "pillar-auto": {"schedule": "auto"},
    "pillar-fixed": {"adapt": "off"},
    "pillar-lookup": {"lookup": "on"},
    "pillar-fp8": {"draft_weights": "fp8"},
    "pillar-int8": {"draft_weights": "int8"},
    "pillar-int4": {"draft_weights": "int4"},
    "pillar-int4+fp8": {"draft_weights": "int4+fp8"},
    "pillar-flashinfer": {"attention": "flashinfer"},
    "pillar-stride2": {"score_layer_stride": 2},
    "pillar-every2": {"score_every": 2},
    "window": {"selector": "window"},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; an existing one is added to")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--max-tokens", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--storm", type=int, default=50, help="concurrent requests of the abort storm")
    parser.add_argument("--storm-tokens", type=int, default=400, help="most tokens of a request of the storm")
    parser.add_argument(
        "--server-arg", action="append", default=[], help="more server arguments, one word each"
    )
    return parser.parse_args()


async def storm(url: str, prompts: list[list[int]], count: int, new_tokens: int) -> dict[str, int]:
    """`count` requests at once, about half of them cut off by the client at a random time."""
    rng = random.Random(7)
    ended = {"finished": 0, "aborted": 0, "failed": 0}

    async def one(session: aiohttp.ClientSession, ids: list[int], patience: float) -> None:
        payload = {
            "input_ids": ids,
            "sampling_params": {"temperature": rng.choice([0, 0.8]), "max_new_tokens": new_tokens},
        }
        try:
            async with asyncio.timeout(patience), session.post(f"{url}/generate", json=payload) as reply:
                body = await reply.json()
                ended["finished" if reply.status == 200 and "text" in body else "failed"] += 1
        except TimeoutError:
            ended["aborted"] += 1

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        waits = [rng.uniform(0.1, 6.0) if rng.random() < 0.5 else 1800.0 for _ in range(count)]
        await asyncio.gather(*(one(session, prompts[i % len(prompts)], wait) for i, wait in enumerate(waits)))
    return ended


async def gap(url: str, ids: list[int]) -> float:
    """How much likelier the best token after `ids` is than the second best, in log-probability."""
    payload = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{url}/generate", json=payload) as reply,
    ):
        best, second = (await reply.json())["meta_info"]["output_top_logprobs"][0]
    return round(best[0] - second[0], 4)


async def load(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session:
        return await get_load(session, url)


def parted(ours: list[int], reference: list[int]) -> int | None:
    """Position of the first different token, None where all are equal."""
    if ours == reference:
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b),
        min(len(ours), len(reference)),
    )


def run(
    variant: str, args: argparse.Namespace, reference: list[list[int]] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    problems = load_problems(args.prompts)
    prompts = encode_prompts(problems, args.model_path)
    config = VARIANTS[variant]
    extra = (
        []
        if config is None
        else ["--speculative-algorithm", "SPARSESPEC", "--sparsespec-config", json.dumps(config)]
    )
    began = time.monotonic()
    with ServerProcess(
        args.model_path, [*args.server_arg, *extra], log_path=args.out.with_suffix(f".{variant}.log")
    ) as server:
        up = time.monotonic() - began
        outcomes = [Outcome(problem) for problem in problems]
        seconds = asyncio.run(
            answer_all(
                server.url, prompts, outcomes, max_tokens=args.max_tokens, concurrency=args.concurrency
            )
        )
        ids = [outcome.token_ids for outcome in outcomes]
        result: dict[str, Any] = {
            "server_up_s": round(up, 1),
            "right": sum(bool(o.correct) for o in outcomes),
            "problems": len(outcomes),
            "failed": [o.error for o in outcomes if o.state == "failed"],
            "tokens": sum(o.tokens for o in outcomes),
            "tokens_per_s": round(sum(o.tokens for o in outcomes) / seconds, 1),
        }
        if config is not None:
            state = asyncio.run(get_info(server.url))["internal_states"][0]
            result["avg_spec_accept_length"] = state.get("avg_spec_accept_length")
            result["sparsespec"] = state["sparsespec"]
            result["storm"] = asyncio.run(storm(server.url, prompts, args.storm, args.storm_tokens))
            asyncio.run(flush(server.url))
            result["kv_usage_after_storm"] = asyncio.run(load(server.url)).get("token_usage")
            again = [Outcome(problem) for problem in problems[:3]]
            few = min(300, args.max_tokens)
            asyncio.run(answer_all(server.url, prompts[:3], again, max_tokens=few, concurrency=3))
            result["after_storm_parted_at"] = [parted(o.token_ids, ids[i][:few]) for i, o in enumerate(again)]
            if reference is not None:
                places = [parted(a, b) for a, b in zip(ids, reference, strict=True)]
                result["ids_equal"] = places.count(None)
                result["parted_at"] = places
                common = [
                    prompt + theirs[:at]
                    for prompt, theirs, at in zip(prompts, reference, places, strict=True)
                    if at is not None
                ]
                result["gaps_at_partings"] = [asyncio.run(gap(server.url, known)) for known in common]
    return result, ids


def main() -> None:
    args = parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    report["command"] = " ".join([Path(sys.executable).name, *sys.argv])
    report["machine"] = machine()
    for variant in args.variants:
        report["runs"][variant], ids = run(variant, args, report.get("reference_ids"))
        if variant == "plain":
            report["reference_ids"] = ids
        args.out.write_text(json.dumps(report) + "\n")
        shown = {k: v for k, v in report["runs"][variant].items() if k != "sparsespec"}
        print(
            variant, json.dumps(shown), json.dumps(report["runs"][variant].get("sparsespec", {})), flush=True
        )


def machine() -> dict[str, str]:
    import sglang
    import torch

    device = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "device": device,
        "torch": torch.__version__,
        "sglang": sglang.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
