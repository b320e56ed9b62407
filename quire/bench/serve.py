"""`quire bench serve`: a server under load. Flags follow `vllm bench serve`.

With --base-url (or --host, --port) any OpenAI-compatible server is measured; without, `quire serve` is started as a
child with the engine flags given here, and its start-up time is part of the result.
"""

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.bench.common import positive
from quire.bench.machine import describe_machine
from quire.bench.processes import Process, cpu_seconds, server_processes
from quire.bench.report import Metric, Report
from quire.bench.serve_child import ServerChild, serving
from quire.bench.serve_client import Target, fetch
from quire.bench.serve_drive import Plan, drive
from quire.bench.serve_rows import ROWS
from quire.bench.serve_stats import (
    NAMES,
    Stats,
    goodput_limits,
    latency_names,
    metrics,
    percentile_list,
    summarize,
)
from quire.bench.serve_workloads import Item, add_workload_flags, arrivals, items, requests
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs, integer, number
from quire.entrypoints.cli.api_client import key_from

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 16


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire bench serve",
        description="Measure a server under load. Without --base-url a server is started with the engine flags.",
    )
    add_model_argument(parser)
    group = parser.add_argument_group("Server")
    group.add_argument("--base-url", metavar="URL", help="a running server, as http://HOST:PORT; the same as:")
    group.add_argument("--host", metavar="TEXT", help="address of a running server")
    group.add_argument("--port", type=integer, metavar="N", help="its port (default: 8000)")
    group.add_argument("--endpoint", default="/v1/completions", metavar="PATH", help="or /v1/chat/completions")
    group.add_argument("--server-args", default="", metavar="TEXT", help="more flags for the server that is started")
    group.add_argument("--row", choices=tuple(ROWS), help="preset: a fixed workload; sets all its flags")
    add_workload_flags(parser)
    group = parser.add_argument_group("Requests")
    group.add_argument("--ignore-eos", action="store_true", help="generate to exactly the wanted length")
    group.add_argument("--temperature", type=number, default=0.0, metavar="X", help="(default: 0, greedy)")
    group = parser.add_argument_group("Measurement")
    group.add_argument(
        "--repetitions", type=positive, default=1, metavar="N", help="runs to take medians of (default: 1)"
    )
    group.add_argument(
        "--client-processes", type=positive, default=1, metavar="N", help="that share the requests (default: 1)"
    )
    group.add_argument(
        "--percentile-metrics",
        type=latency_names,
        default=list(NAMES),
        metavar="LIST",
        help=f"latencies to report (default: {','.join(NAMES)})",
    )
    group.add_argument(
        "--metric-percentiles", type=percentile_list, default=[50, 90, 99], metavar="LIST", help="(default: 50,90,99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=goodput_limits,
        metavar="NAME:MS",
        help="count requests within these limits, as ttft:200,tpot:50 (also e2el)",
    )
    group.add_argument("--timeout", type=number, default=3600.0, metavar="S", help="for one request (default: 3600)")
    group.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True, help="run some requests first")
    group.add_argument("--probe", action=argparse.BooleanOptionalAction, default=False, help="measure the machine too")
    group = parser.add_argument_group("Output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--save-result", action="store_true", help="write the JSON to a file named by date")
    group.add_argument("--result-file", metavar="FILE", help="write the JSON to this file")
    group.add_argument("--plot", metavar="FILE.png", help="draw percentiles and a timeline (needs matplotlib)")
    add_engine_flags(parser, leave_out=("seed",))
    return parser


def run(args: argparse.Namespace) -> int:
    row = ROWS[args.row] if args.row else None
    if row is not None:
        vars(args).update(row.flags())
    goodput = {name: limit for limits in args.goodput or () for name, limit in limits.items()}
    if args.plot:
        from quire.bench.serve_plot import check_plotting

        check_plotting(args.plot)
    chat = args.endpoint.rstrip("/").endswith("chat/completions")
    stats: list[Stats] = []
    runs = []
    api_cost: list[float] = []
    with _server(args) as (target, child):
        model = asyncio.run(_model(target, None if child else getattr(args, "model", None)))
        processes = _child_processes(child)
        for repetition in range(-1 if args.warm_up else 0, args.repetitions):
            found = items(args, repetition)
            if repetition < 0:
                found = [Item(one.prompt, min(one.output_len, WARM_UP_TOKENS)) for one in found[:WARM_UP_REQUESTS]]
            if chat:
                found = asyncio.run(_as_texts(target, model, found))
            rate = args.request_rate if repetition >= 0 else float("inf")
            times = arrivals(len(found), rate, args.burstiness, args.seed + repetition)
            limit = args.max_concurrency if repetition >= 0 else None
            plan = Plan(target, args.endpoint, limit, requests(found, times, model, chat, args))
            if repetition < 0:
                drive(plan, 1)
                continue
            cost = cpu_seconds(processes, "api")
            one_run = drive(plan, args.client_processes)
            cost = cpu_seconds(processes, "api") - cost
            one = summarize(one_run, goodput)
            if not one.completed:
                raise ValueError(f"every request failed: {_listed(one.errors)}" + _log_tail(child))
            stats.append(one)
            runs.append(one_run)
            if processes:
                api_cost.append(1e6 * cost / one.output_tokens)

    measured = metrics(stats, args.percentile_metrics, args.metric_percentiles)
    if child is not None:
        if api_cost:
            measured.append(Metric("api cpu per token", "us", api_cost, lower_is_better=True))
        measured.append(Metric("start-up to /health", "s", [child.start_up_seconds], lower_is_better=True))
    report = Report(
        "serve",
        _workload(args, chat),
        engine_kwargs(args, leave_out=("seed",)),
        describe_machine(args.probe),
        measured,
        details={"runs": [one.details() for one in stats], "target": target.url if child is None else "started here"},
    )
    _write(args, report, stats)
    if args.plot:
        from quire.bench.serve_plot import plot

        plot(args.plot, runs[-1], stats[-1], "quire bench serve: " + _listed(report.workload))
    return 0 if not any(one.errors for one in stats) else 1


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[Target, ServerChild | None]]:
    key = key_from()
    url = args.base_url
    if url is None and (args.host is not None or args.port is not None):
        host = args.host or "127.0.0.1"
        url = f"http://{f'[{host}]' if ':' in host else host}:{args.port or 8000}"
    if url is not None:
        target = Target(url.rstrip("/"), key, args.timeout)
        target.address()
        yield target, None
        return
    from quire.config import EngineConfig

    options = engine_kwargs(args, leave_out=("seed",))
    EngineConfig.from_kwargs(**options)  # invalid options fail here, not in the child
    with serving(options, shlex.split(args.server_args)) as child:
        yield Target(child.url, key, args.timeout), child


async def _model(target: Target, given: str | None) -> str:
    if given is not None:
        return given
    try:
        status, body = await fetch(target, "GET", "/v1/models")
    except OSError as error:
        raise ValueError(f"no server responds at {target.url}: {error} (--base-url)") from None
    if status != 200:
        raise ValueError(f"{target.url}/v1/models returns status {status}; name the model (--model)")
    return json.loads(body)["data"][0]["id"]


async def _as_texts(target: Target, model: str, found: list[Item]) -> list[Item]:
    """Chat messages are text: the server detokenizes the random ids. Token counts may then differ slightly."""
    made = []
    for item in found:
        if isinstance(item.prompt, str):
            made.append(item)
            continue
        status, body = await fetch(target, "POST", "/detokenize", {"model": model, "tokens": item.prompt})
        if status != 200:
            raise ValueError(
                f"/detokenize returns status {status}, but random prompts need it to become text; give texts "
                "(--dataset-name custom)"
            )
        made.append(Item(json.loads(body)["prompt"], item.output_len))
    return made


def _child_processes(child: ServerChild | None) -> list[Process]:
    try:
        return server_processes(child.process.pid) if child is not None else []
    except ValueError:
        return []


def _workload(args: argparse.Namespace, chat: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"dataset": args.dataset_name, "requests": args.num_prompts}
    if args.row:
        facts = {"row": args.row} | facts
    if args.dataset_name == "random":
        facts |= {"input_len": args.random_input_len, "output_len": args.random_output_len}
        facts |= {"range_ratio": args.random_range_ratio, "prefix_len": args.random_prefix_len}
    elif args.dataset_name == "prefix_repetition":
        facts |= {
            "prefixes": args.prefix_repetition_num_prefixes,
            "prefix_len": args.prefix_repetition_prefix_len,
            "suffix_len": args.prefix_repetition_suffix_len,
            "output_len": args.prefix_repetition_output_len,
        }
    else:
        facts["file"] = Path(args.dataset_path).name
    return facts | {
        "api": "chat" if chat else "completions",
        "rate": str(args.request_rate),
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "ignore_eos": args.ignore_eos,
        "client_processes": args.client_processes,
    }


def _write(args: argparse.Namespace, report: Report, stats: list[Stats]) -> None:
    if args.json:
        print(report.as_json())
    else:
        print(report.as_text())
        for one in stats:
            details = one.details()
            print(f"  run: {_listed({k: v for k, v in details.items() if k != 'errors'})}")
            if one.errors:
                print(f"  errors: {_listed(one.errors)}")
    file = args.result_file
    if file is None and args.save_result:
        file = f"serve-{time.strftime('%Y%m%d-%H%M%S')}.json"
    if file is not None:
        Path(file).write_text(report.as_json() + "\n", "utf-8")


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} {format(v, '.4g') if isinstance(v, float) else v}" for k, v in values.items())


def _log_tail(child: ServerChild | None) -> str:
    return "" if child is None else f"\nthe server's last lines:\n{child.log_tail()}"
