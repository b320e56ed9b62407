"""Rows of one H200 in few minutes: engines start side by side, and are measured in turn while the others idle.

    python -m benchmarks.gpu.together embeddings,adapters,deepseek-v2-lite --out FOLDER [--only lora,b1] [--profile]

A start, whose kernels are compiled first, takes longer than most measurements. Names: `embeddings`; `adapters` (with
the CPU tier and sleep, of the same engine); models of the card, with `+invariant` in batch-invariant mode. As many as
fit the device's memory are started at once. Each writes FOLDER/NAME.json as it goes on, and its log beside it. --only
chooses among rows of the card, and lora, churn, prompts and sleep of the engine with adapters.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kv_tiers
from benchmarks.adapter_files import make_adapter
from benchmarks.gpu import adapters as lora
from quire.bench.internal.card.models import TINY, engine_options, shape_of
from quire.bench.internal.card.profile import profile_decode, profile_text
from quire.bench.internal.card.workloads import GPU_WORKLOADS, Caller, cut
from quire.bench.machine import describe_machine
from quire.bench.workloads import Workload

GIB = 1 << 30
DEVICE_GIB = 130
SECONDS_TO_START = 120
# GiB of weights and of the KV cache; an engine takes some more.
SIZES = {
    "embeddings": (2, 2),
    "adapters": (17, 28),
    "qwen3-0.6b": (2, 30),
    "llama3-8b": (16, 36),
    "llama3-8b-fp8": (9, 36),
    "qwen3-30b-a3b": (57, 30),
    "deepseek-v2-lite": (30, 14),
    "deepseek-v3-6-layers": (70, 14),
}
MORE_GIB = 5
INVARIANT = "+invariant"
PARTS = ("lora", "churn", "prompts", "sleep")
ROWS = ("b1", "nano_greedy", "t512_128", "prefill", "ctx6k")
INVARIANT_ROWS = ("b1", "nano_greedy")
ADAPTERS, RANK = 8, 16
TIER_GIB = 46  # 16 prompts of 8,000 tokens, and all that pushes them out of the device
CHURN = (224, 1024, 192)  # requests, most tokens in, tokens out
PROMPTS = (16, 8000, 1)


class Report:
    """What was found, written after every figure; and the folder in which an engine waits for its turn."""

    def __init__(self, name: str, folder: Path, tiny: bool, only: Sequence[str], profiled: bool) -> None:
        self.name, self.folder, self.tiny, self.only, self.profiled = name, folder, tiny, only, profiled
        self.found: dict[str, Any] = {"machine": describe_machine(probe=False)}

    def add(self, key: str, value: Any) -> None:
        self.found[key] = value
        print(key, json.dumps(value), flush=True)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.found, indent=1) + "\n")

    def wait_for_turn(self) -> None:
        (self.folder / f"{self.name}.ready").touch()
        while not (self.folder / f"{self.name}.turn").exists():
            time.sleep(0.02)

    def options(self, model: str) -> dict[str, Any]:
        found = engine_options(TINY if self.tiny else model, Path(tempfile.mkdtemp()), cpu=self.tiny)
        kv = SIZES[self.name.removesuffix(INVARIANT)][1]
        return found | {"kv_cache_memory_bytes": 2 << 20 if self.tiny else kv * GIB}

    def shape(self, model: str) -> dict[str, Any]:
        return shape_of(TINY if self.tiny else model)


def embeddings(report: Report) -> None:
    from quire import LLM

    draw, vocabulary = random.Random(0), report.shape("qwen3-0.6b")["vocab_size"]
    count, length, short = (16, 24, 8) if report.tiny else (2048, 512, 32)

    def texts(number: int, tokens: int) -> list[Any]:
        ids = range(min(100, vocabulary - 1), vocabulary)
        return [{"prompt_token_ids": draw.choices(ids, k=tokens)} for _ in range(number)]

    options = report.options("qwen3-0.6b") | ({} if report.tiny else {"max_model_len": 1024})
    began = time.perf_counter()
    with LLM(**options, runner="pooling", convert="embed") as llm:
        report.add("start, s", time.perf_counter() - began)

        def seconds(given: list[Any]) -> float:
            started = time.perf_counter()
            llm.embed(given, use_tqdm=False)
            return time.perf_counter() - started

        many, ones = [texts(count, length) for _ in range(4)], [texts(1, short) for _ in range(60)]
        seconds(many.pop())
        report.wait_for_turn()
        report.add("one text, ms", 1e3 * statistics.median(seconds(one) for one in ones))
        report.add("tok/s", [count * length / seconds(given) for given in many])


def adapters(report: Report) -> None:
    """Of an engine with a CPU tier, to which nothing is saved until it is its turn."""
    import torch

    from quire import LLM, SamplingParams
    from quire.distributed.kv_offload.tier_scheduler import TierScheduler

    saves, registered = False, TierScheduler.block_registered

    def block_registered(self: TierScheduler, *given: Any) -> None:
        if saves:
            registered(self, *given)

    TierScheduler.block_registered = block_registered  # type: ignore[method-assign, assignment]
    shape = report.shape("llama3-8b")
    options = report.options("llama3-8b") | {"kv_offloading_size": 0.01 if report.tiny else TIER_GIB}
    options |= {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK, "enable_sleep_mode": True}
    began = time.perf_counter()
    with LLM(**options) as llm:
        report.add("start, s", time.perf_counter() - began)
        caller = Caller(llm, shape["vocab_size"], tiny=report.tiny)
        folder = Path(tempfile.mkdtemp())
        made = [make_adapter(folder, n, shape, RANK, dtype=torch.bfloat16) for n in range(1, ADAPTERS + 1)]
        caller.warm_up(long=True)
        report.wait_for_turn()

        def seconds(workload: Workload, chosen: Sequence[Any] = ()) -> float:
            llm.reset_prefix_cache()
            each = [chosen[i % len(chosen)] if chosen else None for i in range(len(workload.prompts))]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
            started = time.perf_counter()
            llm.generate(workload.prompts, params, use_tqdm=False, lora_request=each)
            return time.perf_counter() - started

        if "lora" in report.only:
            report.add("none", lora.rows(caller, seconds))
            one = cut(caller.gpu_workload("b1"), 1)
            seconds(one, made[:1])
            first = [seconds(one, [adapter]) - seconds(one, [adapter]) for adapter in made[1:]]
            report.add("first use, s", sorted(first))
            report.add("one", lora.one_request(caller, lambda workload: seconds(workload, made[:1])))
            seconds(caller.gpu_workload("prefill"), made)
            report.add("eight", lora.many(caller, lambda workload: seconds(workload, made)))
            if report.profiled:
                report.add("profile", lora.profile(llm, shape["vocab_size"], made, tiny=report.tiny))
        if "churn" in report.only:
            kv_tiers.wait_for_memory(llm)
            draw, (users, longest, output) = random.Random(5), (8, 32, 8) if report.tiny else CHURN
            churn: dict[str, list[float]] = {"off": [], "on": []}
            for saves in (False, True) * 3:
                lengths = [draw.randrange(longest // 8, longest) for _ in range(users)]
                given = [draw.choices(range(10, shape["vocab_size"] // 2), k=length) for length in lengths]
                churn["on" if saves else "off"].append(users * output / kv_tiers.timed(llm, given, output)[0])
            report.add("saving to the tier, tok/s", churn)
        saves = True
        if "prompts" in report.only and not report.tiny:  # whose vocabulary is too small, and cache too large
            kv_tiers.wait_for_memory(llm)
            task = kv_tiers.Options("prompts", None, "dummy", 0, 0, *PROMPTS)
            report.add("prompts, s", kv_tiers.prompts(llm, task))
        if "sleep" in report.only:
            report.add("sleep and wake, s", slept(llm))


def slept(llm: Any) -> list[list[float]]:
    from quire import SamplingParams

    params, rounds = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    text = llm.generate([[100, 101, 102]], params, use_tqdm=False)[0].outputs[0].token_ids
    for _ in range(3):
        started = time.perf_counter()
        llm.sleep(level=1)
        asleep = time.perf_counter()
        llm.wake_up()
        rounds.append([asleep - started, time.perf_counter() - asleep])
        again = llm.generate([[100, 101, 102]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert again == text, "another text after sleeping"
    return rounds


def card(report: Report) -> None:
    from quire import LLM

    model = report.name.removesuffix(INVARIANT)
    invariant = model != report.name
    options = report.options(model) | {"kv_offloading_size": 0}
    began = time.perf_counter()
    with LLM(**options, **({"batch_invariant": True} if invariant and not report.tiny else {})) as llm:
        report.add("start, s", time.perf_counter() - began)
        vocabulary = report.shape(model)["vocab_size"]
        caller = Caller(llm, vocabulary, tiny=report.tiny)
        caller.warm_up(long=True)
        report.wait_for_turn()
        for row in (row for row in (INVARIANT_ROWS if invariant else ROWS) if row in report.only):
            report.add(row, GPU_WORKLOADS[row](caller).figures)
        for batch in (1, 16 if report.tiny else 256) if report.profiled else ():
            found = profile_decode(llm, vocabulary, batch, tiny=report.tiny)
            report.add(f"profile of {batch}", found)
            print(profile_text(model, found), flush=True)


def measure(name: str, report: Report) -> None:
    kinds: dict[str, Callable[[Report], None]] = {"embeddings": embeddings, "adapters": adapters}
    kinds.get(name, card)(report)


def groups(names: Sequence[str]) -> list[list[str]]:
    """In order, as many as fit together."""
    found: list[list[str]] = []
    free = 0
    for name in names:
        needed = sum(SIZES[name.removesuffix(INVARIANT)]) + MORE_GIB
        if not found or needed > free:
            found.append([])
            free = DEVICE_GIB
        found[-1].append(name)
        free -= needed
    return found


def run(names: Sequence[str], folder: Path, end: float, options: Sequence[str]) -> None:
    """`end`: on the monotonic clock."""
    began, running = time.monotonic(), {}
    for name in names:
        for file in (folder / f"{name}.ready", folder / f"{name}.turn"):
            file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu.together", name, "--out", str(folder), "--child", *options]
        log = (folder / f"{name}.log").open("wb")
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def waits(name: str) -> bool:
        return running[name].poll() is not None or (folder / f"{name}.ready").exists()

    while not all(map(waits, names)) and time.monotonic() < min(end, began + SECONDS_TO_START):
        time.sleep(0.1)
    print(f"{time.monotonic() - began:5.0f} s: {', '.join(names)} started", flush=True)
    for name in names:
        (folder / f"{name}.turn").touch()
        while running[name].poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        running[name].kill()
        print(f"{time.monotonic() - began:5.0f} s: {name} ended with {running[name].wait()}", flush=True)
        if running[name].returncode:
            print((folder / f"{name}.log").read_bytes()[-2000:].decode(errors="replace"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", help=f"with commas: {', '.join(SIZES)}; those of the card also with {INVARIANT}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join((*PARTS, *ROWS)), help="with commas (default: all)")
    parser.add_argument("--seconds", type=float, default=550)
    parser.add_argument("--profile", action="store_true", help="decode steps by kernel")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU in each one's place, to try this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names.split(",")
    if unknown := {name.removesuffix(INVARIANT) for name in names} - SIZES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: unknown; allowed: {', '.join(SIZES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        only = args.only.split(",")
        measure(args.names, Report(args.names, args.out, args.tiny, only, args.profile))
        return
    os.environ["PYTHONUNBUFFERED"] = "1"
    end = time.monotonic() + args.seconds
    options = ["--only", args.only, *(["--profile"] * args.profile), *(["--tiny"] * args.tiny)]
    for group in groups(names):
        run(group, args.out, end, options)


if __name__ == "__main__":
    main()
