"""Shared by the benchmarks: flags, a timed call, and printing the report."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire.bench.machine import describe_machine
from quire.bench.report import Metric, Report
from quire.bench.workloads import CPU_TOKEN_ID_LIMIT, Shape, Workload, random_workload
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs, integer

if TYPE_CHECKING:
    from quire import LLM, SamplingParams

T = TypeVar("T")
PERCENTILES = (10, 25, 50, 75, 90, 99)
WARM_UP = Shape(requests=4, own=64, output=16)


def bench_parser(benchmark: str, description: str, repetitions: int) -> FlagParser:
    parser = FlagParser(prog=f"quire bench {benchmark}", description=description)
    add_model_argument(parser)
    group = parser.add_argument_group("Measurement")
    group.add_argument(
        "--repetitions",
        type=positive,
        default=repetitions,
        metavar="N",
        help=f"runs to take the median of (default: {repetitions})",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the machine's read bandwidth and GEMM rate too",
    )
    add_engine_flags(parser)
    return parser


def add_shape_flags(parser: FlagParser, default: Shape, *, many: bool) -> None:
    group = parser.add_argument_group("Workload: random token ids")

    def add(name: str, value: int, help: str) -> None:
        text = f"{help} (default: {value})"
        group.add_argument(name, type=positive, default=value, metavar="N", help=text)

    if many:
        add("--num-prompts", default.requests, "requests, all sent at once")
    add("--input-len", default.own, "prompt tokens of a request")
    add("--output-len", default.output, "tokens generated for a request")
    add("--token-id-limit", CPU_TOKEN_ID_LIMIT, "draw token ids below this; lower it for a smaller vocabulary")


def positive(text: str) -> int:
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least 1")
    return value


def add_output_json(parser: FlagParser) -> None:
    parser.add_argument("--output-json", metavar="FILE", help="write the results with vLLM's keys to this file")


def add_generation_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Generation")
    group.add_argument("--n", type=positive, default=1, metavar="N", help="completions per prompt (default: 1)")
    group.add_argument(
        "--disable-detokenize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave detokenization out of the measured time (default: left out)",
    )
    group.add_argument("--profile", action="store_true", help="let the engine's profiler record the measured run")


def exact_params(lengths: Sequence[int], temperature: float, n: int, detokenize: bool) -> "list[SamplingParams]":
    """Parameters that generate exactly these lengths; several completions are sampled, greedy ones would be equal."""
    from quire import SamplingParams

    temperature = temperature if n == 1 else max(temperature, 1.0)
    return [
        SamplingParams(n=n, temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=detokenize)
        for length in lengths
    ]


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def timed_generate(
    llm: "LLM", workload: Workload, temperature: float = 0.0, n: int = 1, detokenize: bool = False
) -> float:
    """Seconds of one blocking call that generates exactly the given lengths."""
    params = exact_params(workload.output_lens, temperature, n, detokenize)
    seconds, outputs = timed(lambda: llm.generate(workload.prompts, params, use_tqdm=False))
    check_lengths(outputs, workload.output_lens, n)
    return seconds


def check_lengths(outputs: Sequence[Any], wanted: Sequence[int], n: int) -> None:
    lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
    if lengths != [length for length in wanted for _ in range(n)]:
        causes = {cause for output in outputs if (cause := getattr(output, "error", None))}
        why = f"engine error: {causes.pop()}" if causes else "is --max-model-len below --input-len + --output-len?"
        raise ValueError(
            f"{sum(lengths)} tokens were generated instead of {n * sum(wanted)}, so the rate would be wrong; {why}"
        )


def profiled(engine: Any, work: Callable[[], T], run: Callable[[Any], object] = lambda done: done) -> T:
    """The result of `work`, recorded by the engine's profiler (--profiler-config says where). `run` awaits the calls of
    an asynchronous engine."""
    start = getattr(engine, "start_profile", None)
    if start is None:
        raise ValueError("--profile is not available yet: profiling of an engine in this process")
    run(start())
    try:
        return work()
    finally:
        run(engine.stop_profile())


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {str(p): float(np.percentile(values, p)) for p in PERCENTILES}


def write_json(file: str | None, results: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(results, indent=4) + "\n", "utf-8")


def warm_up(llm: "LLM", token_id_limit: int) -> None:
    timed_generate(llm, random_workload("warm-up", 0, WARM_UP, token_id_limit))


def print_report(benchmark: str, args: argparse.Namespace, workload: dict[str, Any], metrics: Sequence[Metric]) -> None:
    report = Report(benchmark, workload, engine_kwargs(args), describe_machine(args.probe), metrics)
    print(report.as_json() if args.json else report.as_text())
