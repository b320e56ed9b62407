"""Engines in turns under the card's CPU workloads: all stay loaded, one works at a time. Ratios are of medians.

    python -m benchmarks.peers.alternating --model FOLDER --vllm PYTHON [--engines quire quire,quantization=int8 vllm]
        [--before CHECKOUT] [--workloads prefill throughput] [--rounds 5] [--http] [--output FILE]

Run by Quire's Python from its repository. FOLDER is a checkpoint (checkpoint.py), PYTHON that of vLLM's environment.
An engine is a name with options of its `LLM`; `before` is Quire of the other checkout. With --http the engines are
servers, and a figure is the output of 100 requests at once (`quire bench serve --row cpu-at-once`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from benchmarks.peers import vllm_cpu
from benchmarks.peers.common import (
    FIRST_PROMPT,
    WARM_UP,
    WORKLOADS,
    Column,
    Seconds,
    bench_serve,
    measure,
    serving,
    warm_up_server,
)
from quire.bench.workloads import Workload

CACHE_BYTES = 2 << 30
MAX_MODEL_LEN = 2048
HTTP_ROW, HTTP_FIGURE = "cpu-at-once", "output"


def options_of(engine: str, model: str) -> tuple[str, dict[str, Any]]:
    name, *words = engine.split(",")
    chosen: dict[str, Any] = {"model": model, "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
    if name != "vllm":
        chosen["kv_cache_memory_bytes"] = CACHE_BYTES
    return name, chosen | dict(word.split("=", 1) for word in words)


def quire_caller(options: dict[str, Any]) -> Seconds:
    from quire import LLM, SamplingParams
    from quire.platforms import cpu_cores

    # Others hold the claim to the cores, but do not work while this one does.
    with patch.object(cpu_cores, "Claim", lambda cpus: Mock(granted=True)):
        llm = LLM(**options)

    def seconds(workload: Workload) -> float:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload.output_lens
        ]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in workload.prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    return seconds


def serve(engine: str, model: str) -> None:
    """In a process of its own: answers (workload, repetition) with its figures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    name, options = options_of(engine, model)
    if name == "vllm":
        from vllm import LLM

        seconds = vllm_cpu.caller(LLM(**options))
    else:
        seconds = quire_caller(options)
    for workload in (FIRST_PROMPT, WARM_UP):
        seconds(workload)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(seconds, *json.loads(line))), file=answers, flush=True)
    os._exit(0)  # vLLM's engine process would keep this one from ending


class Engine:
    def __init__(self, engine: str, args: argparse.Namespace) -> None:
        self.name = engine
        python = args.vllm if engine.startswith("vllm") else sys.executable
        # As a file: the package that it finds is that of its environment.
        command = [python, "-P", __file__, "--serve", engine, "--model", args.model]
        self.process = subprocess.Popen(
            command, env=environment(engine, args), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def figures(self, workload: str, repetition: int) -> dict[str, float]:
        assert self.process.stdin is not None
        print(json.dumps((workload, repetition)), file=self.process.stdin, flush=True)
        found: dict[str, float] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        return json.loads(line)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def environment(engine: str, args: argparse.Namespace) -> dict[str, str]:
    """Of its process, which finds packages in the checkout that it is to run."""
    checkout = args.before if engine.startswith("before") else Path(__file__).parents[2]
    chosen = os.environ | {"PYTHONPATH": str(checkout)}
    if engine.startswith("vllm"):
        chosen |= vllm_cpu.recommended(args.preload, Path(args.vllm).parent.parent)
    return chosen


class Server:
    """Over HTTP: the output of a row of requests."""

    def __init__(self, engine: str, args: argparse.Namespace, stack: ExitStack) -> None:
        self.name = engine
        name, options = options_of(engine, args.model)
        command = vllm_cpu.server_command(options, args.vllm) if name == "vllm" else quire_command(options)
        self.url = stack.enter_context(serving(Column(engine, options), command, environment(engine, args)))
        self.client = str(Path(sys.executable).parent / "quire")
        warm_up_server(self.client, self.url)

    def figures(self, workload: str, repetition: int) -> dict[str, float]:
        seed = str(repetition + 1)  # the warm-up's is 0, and its prompts may be cached
        report = bench_serve(self.client, self.url, "--row", workload, "--seed", seed, "--repetitions", "1")
        return {f"{workload} {HTTP_FIGURE}": report["metrics"][HTTP_FIGURE]["values"][0]}


def quire_command(options: dict[str, Any]) -> list[str]:
    words = [sys.executable, "-m", "quire", "serve"]
    for name, value in options.items():
        words += [str(value)] if name == "model" else [f"--{name.replace('_', '-')}", str(value)]
    return [*words, "--host", "127.0.0.1", "--port"]


Found = dict[str, dict[str, list[float]]]  # values by figure and engine


def one_round(engines: list[Any], workloads: list[str], repetition: int, found: Found) -> None:
    for workload in workloads:
        for engine in engines if repetition % 2 else engines[::-1]:
            for figure, value in engine.figures(workload, repetition).items():
                found.setdefault(figure, {}).setdefault(engine.name, []).append(value)
                print(f"{figure} {engine.name}: {value:,.1f}", flush=True)


def show(found: Found, first: str) -> None:
    for figure, values in found.items():
        ours = values[first]
        for name, some in values.items():
            pairs = sorted(a / b for a, b in zip(ours, some, strict=True))
            ratio = f"{first} has {statistics.median(ours) / statistics.median(some):.3f} of it"
            spread = f", pairs {pairs[0]:.3f} to {pairs[-1]:.3f}"
            print(
                f"{figure:>18} {name:<32} {statistics.median(some):>9,.1f}  {ratio + spread if name != first else ''}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--preload", action="append", default=[], metavar="FILE", help="for vLLM, such as tcmalloc")
    parser.add_argument("--engines", nargs="+", default=["quire", "vllm"])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["prefill", "throughput", "latency"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model)
        return
    with ExitStack() as stack:
        workloads = [HTTP_ROW] if args.http else args.workloads
        engines: list[Any] = []
        for engine in args.engines:
            engines.append(Server(engine, args, stack) if args.http else stack.enter_context(Engine(engine, args)))
        found: Found = {}
        for repetition in range(args.rounds):
            one_round(engines, workloads, repetition, found)
    show(found, args.engines[0])
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
