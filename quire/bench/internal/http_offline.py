"""`quire bench http`: the same requests offline and over HTTP, alternating, and the API process's CPU time.

Both engines stay loaded; the one that is not measured is idle. The offline side does not
detokenize, the server does.
"""

import argparse
import asyncio
import shlex

from quire.bench.common import add_shape_flags, bench_parser, timed_generate, warm_up
from quire.bench.machine import describe_machine
from quire.bench.processes import Process, cpu_seconds, server_processes
from quire.bench.report import Metric, Report
from quire.bench.serve_child import serving
from quire.bench.serve_client import Request, Target, fetch
from quire.bench.serve_drive import Plan, drive
from quire.bench.serve_stats import summarize
from quire.bench.workloads import CPU_SHAPES, Shape, Workload, random_workload
from quire.config.flags import FlagParser, engine_kwargs

DEFAULT = CPU_SHAPES["throughput"]
PATH = "/v1/completions"


def parser() -> FlagParser:
    parser = bench_parser("http", "Compare HTTP streaming with offline generation, same requests.", repetitions=5)
    add_shape_flags(parser, DEFAULT, many=True)
    parser.add_argument("--server-args", default="", metavar="TEXT", help="more flags for the server that is started")
    return parser


def run(args: argparse.Namespace) -> int:
    from quire import LLM
    from quire.config import EngineConfig

    options = engine_kwargs(args)
    EngineConfig.from_kwargs(**options)
    shape = Shape(requests=args.num_prompts, own=args.input_len, output=args.output_len)
    offline: list[float] = []
    over_http: list[float] = []
    costs: dict[str, list[float]] = {"api": [], "engine": []}
    with serving(options, ["--enable-admin", *shlex.split(args.server_args)]) as child:
        target = Target(child.url, timeout=3600)
        processes = server_processes(child.process.pid)
        llm = LLM(**options)
        try:
            warm_up(llm, args.token_id_limit)
            stream(target, random_workload("warm-up", 0, Shape(4, 64, 16), args.token_id_limit))
            for repetition in range(args.repetitions):
                workload = random_workload("throughput", repetition, shape, args.token_id_limit)
                llm.reset_prefix_cache()
                asyncio.run(fetch(target, "POST", "/reset_prefix_cache"))
                # Alternate the order, so that drift of the machine affects both sides equally.
                for side in ("offline", "http") if repetition % 2 == 0 else ("http", "offline"):
                    if side == "offline":
                        offline.append(workload.num_output_tokens / timed_generate(llm, workload))
                    else:
                        rate, cost = stream(target, workload, processes)
                        over_http.append(rate)
                        for role, seconds in cost.items():
                            costs[role].append(1e6 * seconds / workload.num_output_tokens)
        finally:
            llm.shutdown()

    metrics = [
        Metric("http / offline", "", [h / o for h, o in zip(over_http, offline, strict=True)]),
        Metric("http", "tok/s", over_http),
        Metric("offline", "tok/s", offline),
        Metric("api cpu per token", "us", costs["api"], lower_is_better=True),
        Metric("engine cpu per token", "us", costs["engine"], lower_is_better=True),
    ]
    facts = {"requests": shape.requests, "input_len": shape.own, "output_len": shape.output}
    report = Report("http", facts, options, describe_machine(args.probe), metrics)
    print(report.as_json() if args.json else report.as_text())
    return 0


def stream(
    target: Target, workload: Workload, processes: list[Process] | None = None
) -> tuple[float, dict[str, float]]:
    """Output tokens per second of all requests at once, and the CPU seconds by process role."""
    common = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    bodies = [
        {"prompt": prompt, "max_tokens": length, **common}
        for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
    ]
    plan = Plan(target, PATH, None, [Request(i, body) for i, body in enumerate(bodies)])
    before = {role: cpu_seconds(processes or [], role) for role in ("api", "engine")}
    stats = summarize(drive(plan, 1))
    cost = {role: cpu_seconds(processes or [], role) - spent for role, spent in before.items()}
    if stats.errors or stats.output_tokens != workload.num_output_tokens:
        raise ValueError(
            f"{stats.output_tokens} tokens instead of {workload.num_output_tokens}, so the rate would be wrong; "
            f"errors: {stats.errors or 'none'}"
        )
    return stats.output_tokens / stats.duration, cost
