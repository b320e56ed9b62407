"""What a CPU tier of the KV cache gains and costs: the same requests with it and without, in alternating processes.

    python -m benchmarks.kv_tiers chats|prompts|churn [--rounds 2] [--model MODEL] [--out FILE.json] [sizes]

chats    two-turn chats whose first turn has left the device: time to first token of the second turn, one at a time.
prompts  16 prompts of 8,000 tokens at once, one token each: computed, from the device, and from the tier (GPU).
churn    as many requests three times with other prompts, in a pool too small to keep them, so that blocks are evicted
         all the time and never hit: output tokens per second.

--device-gib is the device's cache, --tier-gib the tier. On a CPU a copy is part of the step; on a GPU it is beside it.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.machine import describe_machine

SECONDS_TO_PIN = 120


@dataclass
class Options:
    task: str
    model: str | None
    load_format: str
    device_gib: float
    tier_gib: float
    users: int
    tokens: int
    output: int
    seed: int = 0


def run(options: Options) -> dict[str, Any]:
    """In a process of its own: one engine, one figure or several."""
    from quire import LLM

    llm = LLM(
        **({"model": options.model} if options.model else {}),
        load_format=options.load_format,
        skip_tokenizer_init=True,  # prompts are token ids, and a folder may hold a shape alone
        kv_cache_memory_bytes=int(options.device_gib * 2**30),
        kv_offloading_size=options.tier_gib,
        max_model_len=options.tokens + options.output + 64,
    )
    try:
        wait_for_memory(llm)
        return {"chats": chats, "prompts": prompts, "churn": churn}[options.task](llm, options) | {"tier": tier(llm)}
    finally:
        llm.shutdown()


def _params(max_tokens: int) -> Any:
    from quire import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _prompt(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, 30000) for _ in range(count)]


def wait_for_memory(llm: Any) -> None:
    """Memory of a GPU's tier is pinned in the background, and until then nothing is saved there."""
    end = time.monotonic() + SECONDS_TO_PIN
    while _slots_to_come(llm):
        if time.monotonic() > end:
            raise RuntimeError(f"the tier's memory was not ready after {SECONDS_TO_PIN} s")
        time.sleep(0.1)
    settle(llm)


def _connectors(llm: Any) -> list[Any]:
    """Not by `collective_rpc`, which may change weights, so that the engine forgets what it has computed."""
    transfers = llm.llm_engine.client.core.executor.worker.runner.transfers
    return [] if transfers is None else transfers.connectors


def _slots_to_come(llm: Any) -> int:
    return sum(one.memory.num_slots - one.memory.num_ready for one in _connectors(llm))


def settle(llm: Any) -> None:
    """Some steps, with which what is left is saved; then one by which the scheduler hears of it."""
    for steps in (16, 2):
        llm.generate([[1, 2, 3]], _params(steps), use_tqdm=False)
        for connector in _connectors(llm):
            connector.copier.drain()


def tier(llm: Any) -> dict[str, Any] | None:
    stats = llm.llm_engine.stats.tiers
    return {name: getattr(stats[0], name) for name in stats[0].__struct_fields__} if stats else None


def timed(llm: Any, given: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
    began = time.perf_counter()
    outputs = llm.generate(given, _params(max_tokens), use_tqdm=False)
    return time.perf_counter() - began, outputs


def chats(llm: Any, options: Options) -> dict[str, Any]:
    draw = random.Random(options.seed)
    first = [_prompt(draw, options.tokens) for _ in range(options.users)]
    answers = [timed(llm, [prompt], options.output)[1][0] for prompt in first]
    seconds, cached = [], []
    for prompt, answer in zip(first, answers, strict=True):
        turn = [*prompt, *answer.outputs[0].token_ids, *_prompt(draw, 24)]
        took, (output,) = timed(llm, [turn], 1)
        seconds.append(took)
        cached.append(output.num_cached_tokens)
    return {"first_token": statistics.median(seconds), "all": seconds, "cached": cached}


def prompts(llm: Any, options: Options) -> dict[str, Any]:
    draw = random.Random(options.seed)
    given = [_prompt(draw, options.tokens) for _ in range(options.users)]
    others = [_prompt(draw, options.tokens) for _ in range(2 * options.users)]
    cold, _ = timed(llm, given, 1)
    settle(llm)
    device, _ = timed(llm, given, 1)
    while max(_cached(llm, given)) > 0:
        if not others:
            raise RuntimeError("the device is too large for other prompts to push these out of it (--device-gib)")
        timed(llm, [others.pop()], 1)
    settle(llm)
    returned, outputs = timed(llm, given, 1)
    return {"cold": cold, "device": device, "tier": returned, "cached": [one.num_cached_tokens for one in outputs]}


def _cached(llm: Any, given: list[list[int]]) -> list[int]:
    kv = llm.llm_engine.client.core.scheduler.kv
    hashes: list[list[bytes]] = [[] for _ in given]
    for found, prompt in zip(hashes, given, strict=True):
        kv.hasher.extend(found, np.asarray(prompt, np.int32), len(prompt), b"", ())
    return [kv._longest_hit(found, len(prompt) - 1) for found, prompt in zip(hashes, given, strict=True)]


def churn(llm: Any, options: Options) -> dict[str, Any]:
    draw = random.Random(options.seed)
    rates = []
    for _ in range(3):
        given = [_prompt(draw, draw.randrange(options.tokens // 8, options.tokens)) for _ in range(options.users)]
        took, outputs = timed(llm, given, options.output)
        rates.append(sum(len(one.outputs[0].token_ids) for one in outputs) / took)
    return {"rate": statistics.median(rates), "all": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("chats", "prompts", "churn"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device-gib", type=float, default=0.06)
    parser.add_argument("--tier-gib", type=float, default=1.0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print("result", json.dumps(run(Options(**json.loads(given.child)))), flush=True)
        return
    names = ("task", "model", "load_format", "device_gib", "tier_gib", "users", "tokens", "output")
    options = {name: getattr(given, name) for name in names}
    results: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for seed in range(given.rounds):
        for name in ("off", "on") if seed % 2 == 0 else ("on", "off"):
            tier_gib = given.tier_gib if name == "on" else 0.0
            result = child(Options(**{**options, "tier_gib": tier_gib, "seed": seed}))
            results[name].append(result)
            print(name, {key: value for key, value in result.items() if key not in ("all", "cached")}, flush=True)
    if given.out:
        record = {"machine": describe_machine(probe=False), "options": options, "results": results}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


def child(options: Options) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.kv_tiers", options.task, "--child", json.dumps(asdict(options))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("result "))
    found: dict[str, Any] = json.loads(line.removeprefix("result "))
    return found


if __name__ == "__main__":
    main()
