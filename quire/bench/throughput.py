"""`quire bench throughput`: many requests at once, offline; output tokens per second."""

import argparse

from quire.bench.common import add_shape_flags, bench_parser, print_report, timed_generate, warm_up
from quire.bench.report import Metric
from quire.bench.workloads import CPU_SHAPES, Shape, random_workload
from quire.config.flags import FlagParser, engine_kwargs

DEFAULT = CPU_SHAPES["throughput"]


def parser() -> FlagParser:
    parser = bench_parser("throughput", "Measure output tokens per second of many requests at once.", repetitions=3)
    add_shape_flags(parser, DEFAULT, many=True)
    return parser


def run(args: argparse.Namespace) -> int:
    from quire import LLM

    shape = Shape(requests=args.num_prompts, own=args.input_len, output=args.output_len)
    llm = LLM(**engine_kwargs(args))
    seconds: list[float] = []
    try:
        warm_up(llm, args.token_id_limit)
        for repetition in range(args.repetitions):
            llm.reset_prefix_cache()
            workload = random_workload("throughput", repetition, shape, args.token_id_limit)
            seconds.append(timed_generate(llm, workload))
    finally:
        llm.shutdown()

    output_tokens = shape.requests * shape.output
    all_tokens = shape.requests * (shape.own + shape.output)
    metrics = [
        Metric("output", "tok/s", [output_tokens / s for s in seconds]),
        Metric("prompt and output", "tok/s", [all_tokens / s for s in seconds]),
        Metric("time", "s", seconds, lower_is_better=True),
    ]
    workload_facts = {"requests": shape.requests, "input_len": shape.own, "output_len": shape.output}
    print_report("throughput", args, workload_facts, metrics)
    return 0
