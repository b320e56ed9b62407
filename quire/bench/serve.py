"""`quire bench serve`: a server under load. Flags follow `vllm bench serve`.

With --base-url (or --host, --port, --backend) any OpenAI-compatible server is measured; without, `quire serve` is
started as a child with the engine flags given here, and its start-up time is part of the result.
"""

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.bench.datasets import RANDOM, Item, check_dataset, items, set_lengths, workload_facts
from quire.bench.machine import describe_machine
from quire.bench.processes import Process, cpu_seconds, server_processes
from quire.bench.report import Metric, Report
from quire.bench.serve_apis import BACKENDS, Api, backend_of
from quire.bench.serve_child import ServerChild, serving
from quire.bench.serve_client import Client, Run, Target, fetch
from quire.bench.serve_drive import Plan, drive
from quire.bench.serve_flags import parser
from quire.bench.serve_result import result_file, save_results, vllm_result
from quire.bench.serve_rows import ROWS
from quire.bench.serve_stats import NAMES, Stats, metrics, summarize
from quire.bench.serve_workloads import RampUp, arrivals, ramp_up, requests
from quire.bench.texts import Texts, texts_for
from quire.config.flags import engine_kwargs
from quire.entrypoints.cli.api_client import key_from

__all__ = ["parser", "run"]

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 16
READY_POLL_SECONDS = 0.5
T = TypeVar("T")


@dataclass
class Load:
    """Everything that a repetition is made of."""

    args: argparse.Namespace
    target: Target
    model: str  # its name in requests
    api: Api
    texts: Texts
    ramp: RampUp | None

    def batches(self, repetition: int) -> list[list[Item]]:
        """The prompts of each request."""
        found = items(self.args, repetition, self.texts, self.api.takes_texts)
        if self.api.takes_texts:
            # Token counts may then differ slightly from the wanted ones.
            found = [Item(self._text(one.prompt), one.output_len) for one in found]
        size = self.args.random_batch_size
        return [found[start : start + size] for start in range(0, len(found), size)]

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.texts.decode(prompt)

    def plan(self, repetition: int) -> Plan:
        args = self.args
        found = self.batches(repetition)
        times = arrivals(len(found), args.request_rate, args.burstiness, args.seed + repetition, self.ramp)
        prefix = args.request_id_prefix + (f"{repetition}-" if repetition else "")
        made = requests(found, times, self.model, self.api, args, prefix)
        return Plan(self.target, args.endpoint, args.max_concurrency, made, args.save_detailed, self.api.streams)

    def warm_up_plan(self) -> Plan | None:
        if self.args.num_warmups is not None:
            # Prompts of the measured run, so that what they share is cached as in vLLM.
            found = self.batches(0)[:1] * self.args.num_warmups
        elif self.args.warm_up:
            first = self.batches(-1)[:WARM_UP_REQUESTS]
            found = [[Item(one.prompt, min(one.output_len, WARM_UP_TOKENS)) for one in batch] for batch in first]
        else:
            return None
        prefix = f"{self.args.request_id_prefix}warm-up-"
        made = requests(found, [0.0] * len(found), self.model, self.api, self.args, prefix)
        limit = self.args.max_concurrency if self.args.num_warmups is not None else None
        return Plan(self.target, self.args.endpoint, limit, made, streams=self.api.streams)


def run(args: argparse.Namespace) -> int:
    ramp = _settle(args)
    goodput = {name: limit for limits in args.goodput or () for name, limit in limits.items()}
    stats: list[Stats] = []
    runs: list[Run] = []
    api_cost: list[float] = []
    date = time.strftime("%Y%m%d-%H%M%S")
    with _server(args) as (target, child):
        load = _load(args, target, child, ramp)
        processes = _child_processes(child)
        warm_up = load.warm_up_plan()
        if warm_up is not None and warm_up.requests:
            drive(warm_up, 1)
        if args.profile:
            _profiler(target, "/start_profile")
        for repetition in range(args.repetitions):
            plan = load.plan(repetition)
            cost = cpu_seconds(processes, "api")
            one_run = drive(plan, args.client_processes)
            cost = cpu_seconds(processes, "api") - cost
            one = summarize(one_run, goodput)
            if not one.completed:
                raise ValueError(f"every request failed: {_listed(one.errors)}" + _log_tail(child))
            stats.append(one)
            runs.append(one_run)
            if processes:
                api_cost.append(1e6 * cost / (one.output_tokens if load.api.streams else one.prompt_tokens))
        if args.profile:
            _profiler(target, "/stop_profile")

    measured = metrics(stats, args.percentile_metrics, args.metric_percentiles)
    if child is not None:
        if api_cost:
            measured.append(Metric("api cpu per token", "us", api_cost, lower_is_better=True))
        measured.append(Metric("start-up to /health", "s", [child.start_up_seconds], lower_is_better=True))
    report = Report(
        "serve",
        _workload(args),
        engine_kwargs(args, leave_out=("seed",)),
        describe_machine(args.probe),
        measured,
        details={"runs": [one.details() for one in stats], "target": target.url if child is None else "started here"},
    )
    _write(args, report, stats)
    if args.save_result or args.append_result:
        name = getattr(args, "model", None) or load.model
        results = [vllm_result(args, name, date, *pair) for pair in zip(runs, stats, strict=True)]
        save_results(result_file(args, name, date), results, args.append_result)
    if args.plot:
        from quire.bench.serve_plot import plot

        plot(args.plot, runs[-1], stats[-1], "quire bench serve: " + _listed(report.workload))
    return 0 if not any(one.errors for one in stats) else 1


def _settle(args: argparse.Namespace) -> RampUp | None:
    """Flags that follow from others; mistakes are found before anything starts."""
    if args.row is not None:
        vars(args).update(ROWS[args.row].flags())
    set_lengths(args)
    check_dataset(args)
    if args.plot:
        from quire.bench.serve_plot import check_plotting

        check_plotting(args.plot)
    if args.dataset_name == "random":
        args.ignore_eos = True  # random prompts often end at once
    args.starts_server = args.backend is None and args.base_url is None and args.host is None and args.port is None
    if args.endpoint is None:
        args.endpoint = BACKENDS[args.backend or "openai"].path
    if args.backend is None:
        args.backend = backend_of(args.endpoint)
    api = BACKENDS[args.backend]
    if api != BACKENDS[backend_of(args.endpoint)]:
        raise ValueError(f"--backend {args.backend} sends to {api.path}, not to --endpoint {args.endpoint}")
    if args.random_batch_size > 1 and api.streams:
        raise ValueError(
            f"--random-batch-size is for requests that pool; --backend {args.backend} sends one prompt each"
        )
    if args.percentile_metrics is None:
        args.percentile_metrics = list(NAMES) if api.streams else ["e2el"]
    return ramp_up(args)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[Target, ServerChild | None]]:
    shared: dict[str, Any] = {"api_key": key_from(), "timeout": args.timeout, "headers": tuple(args.header)}
    if not args.starts_server:
        host = args.host or "127.0.0.1"
        address = f"http://{f'[{host}]' if ':' in host else host}:{args.port or 8000}"
        target = Target((args.base_url or address).rstrip("/"), verify=not args.insecure, **shared)
        target.address()
        yield target, None
        return
    from quire.config import EngineConfig

    options = engine_kwargs(args, leave_out=("seed",))
    EngineConfig.from_kwargs(**options)  # invalid options fail here, not in the child
    named = ["--served-model-name", args.served_model_name] if args.served_model_name else []
    with serving(options, [*named, *shlex.split(args.server_args)]) as child:
        yield Target(child.url, **shared), child


def _load(args: argparse.Namespace, target: Target, child: ServerChild | None, ramp: RampUp | None) -> Load:
    given = args.served_model_name or (None if child else getattr(args, "model", None))
    wait = args.ready_check_timeout_sec
    model = _retried(wait, lambda: asyncio.run(_model(target, given)))
    # Random ids need a tokenizer only if one is named: for the size of its vocabulary.
    folder = None if args.dataset_name in RANDOM else getattr(args, "model", None)
    texts = texts_for(target, model, getattr(args, "tokenizer", None), folder, args.chat_template_kwargs)
    load = Load(args, target, model, BACKENDS[args.backend], texts, ramp)
    if wait > 0:
        _retried(wait, lambda: _try_once(load))
    return load


def _retried(seconds: float, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, which may fail for so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except ValueError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(READY_POLL_SECONDS)


def _try_once(load: Load) -> None:
    (request,) = requests(load.batches(0)[:1], [0.0], load.model, load.api, load.args, "ready-")
    message = load.target.message("POST", load.args.endpoint, request.body)

    async def send() -> str | None:
        return (await Client(load.target, load.args.endpoint, streams=load.api.streams).send(0, message)).error

    error = asyncio.run(send())
    if error is not None:
        raise ValueError(f"the server does not answer the first request: {error} (--ready-check-timeout-sec)")


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


def _profiler(target: Target, path: str) -> None:
    status, _ = asyncio.run(fetch(target, "POST", path))
    if status != 200:
        raise ValueError(f"{path} returns status {status}; start the server with --profiler-config (--profile)")


def _child_processes(child: ServerChild | None) -> list[Process]:
    try:
        return server_processes(child.process.pid) if child is not None else []
    except ValueError:
        return []


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    facts = {"row": args.row} if args.row else {}
    facts |= workload_facts(args)
    facts |= {"api": args.endpoint.removeprefix("/v1/"), "rate": str(args.request_rate)}
    if args.random_batch_size > 1:
        facts["batch_size"] = args.random_batch_size
    if args.ramp_up_strategy is not None:
        facts["rate"] = f"{args.ramp_up_start_rps:g} to {args.ramp_up_end_rps:g}, {args.ramp_up_strategy}"
    return facts | {
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
    if args.result_file is not None:
        Path(args.result_file).write_text(report.as_json() + "\n", "utf-8")


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{k} {format(v, '.4g') if isinstance(v, float) else v}" for k, v in values.items())


def _log_tail(child: ServerChild | None) -> str:
    return "" if child is None else f"\nthe server's last lines:\n{child.log_tail()}"
