"""`quire bench latency`: one batch; time to its first tokens, the rate of the tokens after them, and the whole."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.bench.common import (
    add_generation_flags,
    add_output_json,
    add_shape_flags,
    bench_parser,
    percentiles,
    positive,
    print_report,
    profiled,
    timed,
    timed_generate,
    warm_up,
    write_json,
)
from quire.bench.report import Metric
from quire.bench.vllm_flags import add_offline_flags
from quire.bench.workloads import CPU_SHAPES, Shape, Workload, random_workload
from quire.config.flags import FlagParser, engine_kwargs, integer

if TYPE_CHECKING:
    from quire import LLM

DEFAULT = CPU_SHAPES["latency"]


def parser() -> FlagParser:
    parser = bench_parser("latency", "Measure time to first token and decode rate of one batch.", repetitions=3)
    add_shape_flags(parser, DEFAULT, many=False)
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="requests at once (default: 1)")
    parser.add_argument("--use-beam-search", action="store_true", help="search with --n beams instead of sampling")
    add_generation_flags(parser)
    iters: dict[str, Any] = {"dest": "repetitions", "type": positive, "metavar": "N", "default": argparse.SUPPRESS}
    parser.add_argument("--num-iters", help="the same as --repetitions", **iters)
    warm = "whole batches to run first (default: a few short requests)"
    parser.add_argument("--num-iters-warmup", type=integer, metavar="N", help=warm)
    add_output_json(parser)
    add_offline_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.output_len < 2:
        raise ValueError("--output-len is 1; a decode rate needs at least 2")
    from quire import LLM

    shape = Shape(requests=args.batch_size, own=args.input_len, output=args.output_len)
    num_tokens = args.batch_size * args.n * (shape.output - 1)
    llm = LLM(**engine_kwargs(args))
    first: list[float] = []
    decode: list[float] = []
    whole: list[float] = []
    try:
        if args.num_iters_warmup is None:
            warm_up(llm, args.token_id_limit)
        for repetition in range(args.num_iters_warmup or 0):
            _seconds(llm, random_workload("warm-up", repetition, shape, args.token_id_limit), args)
        if args.profile:
            batch = random_workload("latency", 0, shape, args.token_id_limit)
            profiled(llm, lambda: _seconds(llm, batch, args))
            return 0
        for repetition in range(args.repetitions):
            # The same prompts twice, with one token and with all: the difference is decode time.
            batch = random_workload("latency", repetition, shape, args.token_id_limit)
            llm.reset_prefix_cache()
            to_first = _seconds(llm, replace(batch, output_lens=[1] * args.batch_size), args)
            llm.reset_prefix_cache()
            to_last = _seconds(llm, batch, args)
            first.append(to_first)
            whole.append(to_last)
            decode.append(num_tokens / max(to_last - to_first, 1e-9))
    finally:
        llm.shutdown()

    metrics = [
        Metric("time to first token", "ms", [s * 1e3 for s in first], lower_is_better=True),
        Metric("decode", "tok/s", decode),
        Metric("latency", "s", whole, lower_is_better=True),
    ]
    workload_facts = {"requests": args.batch_size, "input_len": shape.own, "output_len": shape.output}
    if args.n > 1:
        workload_facts["beams" if args.use_beam_search else "n"] = args.n
    print_report("latency", args, workload_facts, metrics)
    average = sum(whole) / len(whole)
    write_json(args.output_json, {"avg_latency": average, "latencies": whole, "percentiles": percentiles(whole)})
    return 0


def _seconds(llm: "LLM", batch: Workload, args: argparse.Namespace) -> float:
    if not args.use_beam_search:
        return timed_generate(llm, batch, n=args.n, detokenize=not args.disable_detokenize)
    from quire.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=args.n, max_tokens=batch.output_lens[0], ignore_eos=True)
    return timed(lambda: llm.beam_search(batch.prompts, params))[0]
