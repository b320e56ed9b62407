"""Where a step's time goes on a CPU: every C kernel by itself, and what is left around them.

    python -m benchmarks.cpu.steps [--model smollm2] [--rows 1 8 64] [--prompt 128] [--output FILE]

A batch is given its prompts, then decodes. All is timed once as it is, and once with every kernel's call timed from
Python, replayed steps call by call: that makes them slower. `around` is what is left of the latter: Python, torch, the
engine, and the timing.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from quire import LLM, SamplingParams
from quire.bench.internal.card.models import CPU_MODELS, engine_options
from quire.bench.machine import describe_machine
from quire.bench.workloads import FIRST_TOKEN_ID
from quire.kernels import native
from quire.kernels.native.replay import Recording, Replay

LAST_TOKEN_ID = 49000
STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=CPU_MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 64))
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write JSON there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args.model, Path(folder), cpu=True)
        plain = [measure(LLM(**options), rows, args) for rows in args.rows]
        timer = Timer(native.bound)
        replayed = patch.object(Recording, "replayed", lambda recording: timer.replayed(recording))
        with replayed, patch.object(native, "bound", timer.find):
            timed = [measure(LLM(**options), rows, args, timer) for rows in args.rows]
    results = [{"rows": n, "plain": a, "timed": b} for n, a, b in zip(args.rows, plain, timed, strict=True)]
    for result in results:
        show(result)
    if args.output:
        report = {"machine": describe_machine(probe=True), "results": results}
        args.output.write_text(json.dumps(report, indent=1), "utf-8")


class Timer:
    """Of kernels, by name."""

    def __init__(self, bound: Callable[[str], Any]) -> None:
        self.bound = bound
        self.seconds: Counter[str] = Counter()

    def find(self, name: str) -> Callable[..., Any]:
        return self.timed(name.removeprefix("quire_"), self.bound(name))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] += time.perf_counter() - began
            return result

        return call

    def replayed(self, recording: Recording) -> Replay:
        """As Recording.replayed, call by call."""
        replay, size = self.bound("quire_replay"), recording.size
        calls = [(self.timed(call.kind, replay), bytearray(call.arguments)) for call in recording.calls]
        blocks = [(call, torch.frombuffer(arguments, dtype=torch.uint8)) for call, arguments in calls]

        def run(tokens: int, rows: int, shared: int, kept: Recording = recording) -> None:
            for call, block in blocks:
                call(block.data_ptr(), 1, size, tokens, rows, shared)

        return run


def measure(llm: LLM, rows: int, args: argparse.Namespace, timer: Timer | None = None) -> dict[str, Any]:
    """Milliseconds of all prompts, and of a step of decoding: medians."""
    rng = random.Random(rows)
    kinds: list[dict[str, dict[str, float]]] = []
    walls: list[tuple[float, float]] = []
    for _ in range(args.repetitions + 1):
        prompts = [[rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(args.prompt)] for _ in range(rows)]
        first, prefill = generate(llm, prompts, 1, timer)
        whole, both = generate(llm, prompts, 1 + STEPS, timer)
        walls.append((1e3 * first, 1e3 * (whole - first) / STEPS))
        decode = {name: (seconds - prefill[name]) / STEPS for name, seconds in both.items()}
        kinds.append({"prompts": dict(prefill), "step": decode})
    del walls[0], kinds[0]  # the warm-up
    prompts_ms, step_ms = (statistics.median(pair[i] for pair in walls) for i in (0, 1))
    kernels = {
        part: {name: 1e3 * statistics.median(kind[part].get(name, 0.0) for kind in kinds) for name in kinds[0][part]}
        for part in ("prompts", "step")
    }
    return {"prompts_ms": prompts_ms, "step_ms": step_ms, "kernels": kernels}


def generate(llm: LLM, prompts: list[list[int]], outputs: int, timer: Timer | None) -> tuple[float, Counter[str]]:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=outputs, detokenize=False)
    if timer:
        timer.seconds.clear()
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - began, timer.seconds.copy() if timer else Counter()


def show(result: dict[str, Any]) -> None:
    for part in ("prompts", "step"):
        plain, timed = (result[run][f"{part}_ms"] for run in ("plain", "timed"))
        kernels = result["timed"]["kernels"][part]
        parts = [f"{name} {ms:.2f}" for name, ms in sorted(kernels.items(), key=lambda kv: -kv[1]) if ms >= 0.005]
        parts.append(f"around {timed - sum(kernels.values()):.2f}")
        print(f"{result['rows']:>3} rows, {part}: {plain:.2f} ms; timed {timed:.2f}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
