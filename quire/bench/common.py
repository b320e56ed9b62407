"""Shared by the benchmarks: flags, a timed call, and printing the report."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.machine import describe_machine
from quire.bench.report import Metric, Report
from quire.bench.workloads import CPU_TOKEN_ID_LIMIT, Shape, Workload, random_workload
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs, integer

if TYPE_CHECKING:
    from quire import LLM

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


def timed_generate(llm: "LLM", workload: Workload, temperature: float = 0.0) -> float:
    """Seconds of one blocking call that generates exactly the given lengths, without detokenization."""
    from quire import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in workload.output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != workload.output_lens:
        causes = {cause for output in outputs if (cause := getattr(output, "error", None))}
        why = f"engine error: {causes.pop()}" if causes else "is --max-model-len below --input-len + --output-len?"
        raise ValueError(
            f"{sum(lengths)} tokens were generated instead of {workload.num_output_tokens}, so the rate would be "
            f"wrong; {why}"
        )
    return seconds


def warm_up(llm: "LLM", token_id_limit: int) -> None:
    timed_generate(llm, random_workload("warm-up", 0, WARM_UP, token_id_limit))


def print_report(benchmark: str, args: argparse.Namespace, workload: dict[str, Any], metrics: Sequence[Metric]) -> None:
    report = Report(benchmark, workload, engine_kwargs(args), describe_machine(args.probe), metrics)
    print(report.as_json() if args.json else report.as_text())
