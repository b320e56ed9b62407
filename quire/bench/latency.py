"""`quire bench latency`: one request alone; time to its first token, and the rate of the tokens after it."""

import argparse
from dataclasses import replace

from quire.bench.common import add_shape_flags, bench_parser, print_report, timed_generate, warm_up
from quire.bench.report import Metric
from quire.bench.workloads import CPU_SHAPES, Shape, random_workload
from quire.config.flags import FlagParser, engine_kwargs

DEFAULT = CPU_SHAPES["latency"]


def parser() -> FlagParser:
    parser = bench_parser("latency", "Measure time to first token and decode rate of one request.", repetitions=3)
    add_shape_flags(parser, DEFAULT, many=False)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.output_len < 2:
        raise ValueError("--output-len is 1; a decode rate needs at least 2")
    from quire import LLM

    shape = Shape(requests=1, own=args.input_len, output=args.output_len)
    llm = LLM(**engine_kwargs(args))
    first: list[float] = []
    decode: list[float] = []
    try:
        warm_up(llm, args.token_id_limit)
        for repetition in range(args.repetitions):
            # The same prompt twice, with one token and with all: the difference is decode time.
            whole = random_workload("latency", repetition, shape, args.token_id_limit)
            llm.reset_prefix_cache()
            to_first = timed_generate(llm, replace(whole, output_lens=[1]))
            llm.reset_prefix_cache()
            to_last = timed_generate(llm, whole)
            first.append(to_first)
            decode.append((shape.output - 1) / max(to_last - to_first, 1e-9))
    finally:
        llm.shutdown()

    metrics = [
        Metric("time to first token", "ms", [s * 1e3 for s in first], lower_is_better=True),
        Metric("decode", "tok/s", decode),
    ]
    workload_facts = {"requests": 1, "input_len": shape.own, "output_len": shape.output}
    print_report("latency", args, workload_facts, metrics)
    return 0
