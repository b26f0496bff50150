#!/usr/bin/env python3
"""Send reasoner prompts to a running SGLang server, at temperature 0, and check the answers.

    python check.py --url http://127.0.0.1:30000 --prompts prompts-2k.jsonl --concurrency 16 --json out.json

Prints correct answers by family, output tokens, tokens/s of all requests together and, where the server
speculates, the acceptance length. Exit status: 0 when every request succeeded (right or wrong), else 1.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path

import aiohttp
from synth import render_prompt

ANSWER = re.compile(r"Answer:\s*(.+?)\s*(?:<\||$)", re.DOTALL)


def load(path):
    """Rows of a prompts file. Raises ValueError naming the line that lacks a prompt, an answer or a family."""
    rows = []
    for at, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {at}: not JSON ({error})") from None
        missing = [
            key for key in ("prompt", "answer", "family") if not isinstance(row, dict) or key not in row
        ]
        if missing:
            raise ValueError(
                f"{path}, line {at}: no {', '.join(missing)}; `train.py --mode data` writes such files"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return rows


def is_correct(text, answer):
    """Whether the last `Answer:` of `text` is `answer`."""
    found = ANSWER.findall(text)
    return bool(found) and found[-1] == str(answer).strip()


async def ask(session, url, row, max_tokens):
    """Result of one request: family, correct, text, the server's meta_info; or family and error."""
    result = {
        "id": row.get("id"),
        "family": row["family"],
        "correct": False,
        "text": "",
        "meta": {},
        "error": None,
    }
    sampling = {"temperature": 0, "max_new_tokens": max_tokens}
    try:
        body = {"text": render_prompt(row["prompt"]), "sampling_params": sampling}
        async with session.post(f"{url}/generate", json=body) as reply:
            if reply.status != 200:
                raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:300]}")
            answer = await reply.json()
        result.update(text=answer["text"], meta=answer["meta_info"])
        result["correct"] = is_correct(answer["text"], row["answer"])
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        result["error"] = str(error) or type(error).__name__
    return result


async def ask_all(url, rows, max_tokens, concurrency, timeout):
    """(results in the order of `rows`, seconds from the first request to the last answer)"""
    slots = asyncio.Semaphore(concurrency)
    limits = aiohttp.ClientTimeout(total=timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:

        async def one(row):
            async with slots:
                return await ask(session, url, row, max_tokens)

        began = time.monotonic()
        results = await asyncio.gather(*map(one, rows))
        return results, time.monotonic() - began


def summarise(results, seconds):
    """The figures of a run as a JSON object; speculation is None where the server reports none."""
    metas = [r["meta"] for r in results if r["error"] is None]
    tokens = sum(m["completion_tokens"] for m in metas)
    families = {}
    for r in results:
        right, total = families.get(r["family"], (0, 0))
        families[r["family"]] = (right + r["correct"], total + 1)
    drafted = [m for m in metas if m.get("spec_verify_ct")]
    verified = sum(m["spec_verify_ct"] for m in drafted)
    speculation = None
    if drafted:
        speculation = {
            "requests": len(drafted),
            "verifications": verified,
            "tokens_per_verification": sum(m["completion_tokens"] for m in drafted) / verified,
        }
        if all("spec_num_correct_drafts" in m for m in drafted):
            speculation["acceptance_length"] = (
                1 + sum(m["spec_num_correct_drafts"] for m in drafted) / verified
            )
    return {
        "correct": sum(r["correct"] for r in results),
        "total": len(results),
        "failed": sum(r["error"] is not None for r in results),
        "families": {f: {"correct": right, "total": total} for f, (right, total) in families.items()},
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speculation": speculation,
    }


def report(summary):
    print(f"correct  {summary['correct']}/{summary['total']}")
    for family, count in summary["families"].items():
        print(f"  {family:8} {count['correct']}/{count['total']}")
    print(
        f"tokens   {summary['tokens']} in {summary['seconds']:.1f} s, {summary['tokens_per_second']:.1f} tokens/s"
    )
    if spec := summary["speculation"]:
        length = spec.get("acceptance_length", spec["tokens_per_verification"])
        print(f"accepted {length:.2f} tokens a verification, {spec['verifications']} verifications")
    if summary["failed"]:
        print(f"failed   {summary['failed']} requests")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000")
    add("--prompts", default=str(Path(__file__).with_name("prompts-2k.jsonl")))
    add("--max-tokens", type=int, default=16384)
    add("--concurrency", type=int, default=16)
    add("--timeout", type=float, default=3600, help="seconds for one request")
    add("--json", type=Path, metavar="OUT", help="write the figures and every response to this file")
    args = parser.parse_args()
    if args.max_tokens < 1 or args.concurrency < 1:
        parser.error(
            f"--max-tokens ({args.max_tokens}) and --concurrency ({args.concurrency}) must be at least 1"
        )
    try:
        rows = load(args.prompts)
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    results, seconds = asyncio.run(
        ask_all(args.url.rstrip("/"), rows, args.max_tokens, args.concurrency, args.timeout)
    )
    summary = summarise(results, seconds)
    report(summary)
    for r in results:
        if r["error"]:
            print(f"{r['family']} {r['id']}: {r['error']}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps({**summary, "requests": results}, indent=1) + "\n")
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
