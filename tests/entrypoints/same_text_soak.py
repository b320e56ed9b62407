"""64 streams of random requests through a server on a CPU: every token and logprob as of the request alone, to the bit.

    python -m tests.entrypoints.same_text_soak [--seconds 300] [--seed 0] [--flags "--dtype bfloat16"]

The embedded model, in a KV cache too small for all streams: prefixes are shared and evicted, requests preempted,
prompts chunked; some clients leave in the middle of an answer.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from quire import LLM, SamplingParams
from tests.entrypoints.server_process import ServerProcess, server_process

STREAMS = 64
MODEL = {"dtype": "bfloat16", "max_model_len": 1024}
# Blocks of 16 tokens for some of the streams, and chunks smaller than most prompts.
SERVER = (
    "--max-model-len 1024 --dtype bfloat16 --num-gpu-blocks-override 320 --max-num-batched-tokens 192 --max-num-seqs 64"
)

Answer = tuple[list[int], list[float]]


def bodies(draw: random.Random, count: int) -> list[dict[str, Any]]:
    prefixes = [[draw.randrange(100, 49000) for _ in range(length)] for length in (40, 300, 700)]
    found = []
    for _ in range(count):
        own = [draw.randrange(100, 49000) for _ in range(draw.choice([1, 7, 60, 200]))]
        drawn = {"temperature": 0.8, "seed": draw.randrange(1000)} if draw.random() < 0.3 else {"temperature": 0}
        prompt = draw.choice([[], *prefixes]) + own
        found.append({"prompt": prompt, "max_tokens": draw.randrange(1, 60), "ignore_eos": True, "logprobs": 2} | drawn)
    return found


def alone(requests: list[dict[str, Any]]) -> list[Answer]:
    found: list[Answer] = []
    with LLM(**MODEL, enable_prefix_caching=False) as llm:
        for request in requests:
            params = SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})
            prompt = {"prompt_token_ids": request["prompt"]}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            ids, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            found.append((ids, [each[token].logprob for token, each in zip(ids, logprobs, strict=True)]))
    return found


async def stream(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> Answer | None:
    """None if the client left after so many tokens."""
    ids: list[int] = []
    logprobs: list[float] = []
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as events:
        assert events.status_code == 200, await events.aread()
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                ids += choice["token_ids"] or []
                logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                if leave_after is not None and len(ids) > leave_after:
                    return None
    return ids, logprobs


async def traffic(
    server: ServerProcess, requests: list[dict[str, Any]], wanted: list[Answer], parsed: Any
) -> list[int]:
    """How many answers were compared, and how many clients left."""
    counts, end = [0, 0], time.monotonic() + parsed.seconds

    async def one(number: int) -> None:
        draw = random.Random(parsed.seed * STREAMS + number)
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            while time.monotonic() < end:
                which = draw.randrange(len(requests))
                leave_after = draw.randrange(20) if draw.random() < 0.1 else None
                answer = await stream(client, requests[which], leave_after)
                assert answer in (None, wanted[which]), f"request {which}:\n{answer}\ninstead of\n{wanted[which]}"
                counts[answer is None] += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(one(number))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default=SERVER, help="of the server (default: %(default)s)")
    parsed = parser.parse_args()
    requests = bodies(random.Random(parsed.seed), 200)
    wanted = alone(requests)
    with tempfile.TemporaryDirectory() as folder, server_process(Path(folder), *parsed.flags.split()) as server:
        compared, left = asyncio.run(traffic(server, requests, wanted, parsed))
        counters = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    events = {
        name: sum(float(v) for k, v in counters.items() if f"{name}_total" in k)
        for name in ("num_preemptions", "prefix_cache_hits")
    }
    print(f"{compared} answers equal to those alone, {left} clients left; {events}")
    assert all(events.values()), "nothing was preempted, or nothing shared: there was room for all"


if __name__ == "__main__":
    main()
