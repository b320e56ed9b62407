"""`quire bench soak`: minutes of mixed traffic with clients that disconnect, then a check for leaks.

It fails, with exit code 1, if a request is unaccounted for or failed, if the engine still holds a request or a block
afterwards, if the server logged a traceback, or if a process's memory grew after the warm-up.
"""

import argparse
import asyncio
import json
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.common import positive
from quire.bench.internal.soak.traffic import Tally, Traffic
from quire.bench.machine import describe_machine
from quire.bench.processes import Process, server_processes
from quire.bench.report import Metric, Report
from quire.bench.serve_child import ServerChild, serving
from quire.bench.serve_client import Target, fetch
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs, integer, number

IDLE_SECONDS = 30.0  # within which an engine without requests must be idle
MEGABYTE = 1e6
# Small enough that the warm-up touches the whole KV cache, whose pages count as memory from then on. torch's cache of
# compiled matmuls, one per number of rows, fills up in the warm-up too.
DEFAULTS = {"num_gpu_blocks_override": 512, "max_model_len": 1024}
MIN_SAMPLES = 8  # for a meaningful growth


def parser() -> FlagParser:
    parser = FlagParser(prog="quire bench soak", description="Mixed traffic on a server; nothing may leak.")
    add_model_argument(parser)
    group = parser.add_argument_group("Soak")

    def add(name: str, default: Any, help: str, kind: Any = number) -> None:
        group.add_argument(name, type=kind, default=default, metavar="X", help=f"{help} (default: {default})")

    add("--minutes", 10.0, "how long requests are sent")
    add("--concurrency", 8, "clients, each with one request at a time", positive)
    add("--disconnects", 0.1, "fraction of requests whose client disconnects")
    add("--warm-up", 0.5, "fraction of the time before memory growth is measured")
    add("--sample-seconds", 5.0, "between two memory samples")
    add("--max-growth", 1.0, "maximum growth of a process in megabytes per minute")
    add("--seed", 0, "seed of the traffic", integer)
    group.add_argument("--chaos", action="store_true", help="kill, stop and starve the server's processes meanwhile")
    add("--chaos-interval", 10.0, "mean seconds between chaos actions")
    add("--chaos-seed", 0, "seed of the actions", integer)
    add("--chaos-descriptors", 128, "open-file limit in runs with few descriptors", positive)
    group.add_argument("--server-args", default="", metavar="TEXT", help="more flags for the server")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--result-file", metavar="FILE", help="write the JSON to this file")
    add_engine_flags(parser, leave_out=("seed",))
    return parser


@dataclass
class Memory:
    """Resident bytes of each process over time."""

    processes: list[Process]
    times: list[float] = field(default_factory=list)
    resident: list[list[int]] = field(default_factory=list)

    def sample(self, at: float) -> None:
        self.times.append(at)
        self.resident.append([process.resident_bytes() for process in self.processes])

    def growth_report(self, warm_up: float) -> list[dict[str, Any]]:
        """Per process, in megabytes. Growth is from the highest before the end of the warm-up to the highest after it:
        an allocator returns memory and allocates it again; only a leak raises the peaks."""
        found = []
        minutes = np.array(self.times) / 60
        for i, process in enumerate(self.processes):
            sizes = np.array([row[i] for row in self.resident]) / MEGABYTE
            late = minutes >= warm_up * minutes[-1]
            enough = int(late.sum()) >= MIN_SAMPLES
            growth = None
            if enough and not late.all():
                growth = float((sizes[late].max() - sizes[~late].max()) / (minutes[-1] - minutes[~late][-1]))
            found.append(
                {
                    "role": process.role,
                    "first_mb": float(sizes[0]),
                    "after_warm_up_mb": float(sizes[late][0]),
                    "last_mb": float(sizes[-1]),
                    "highest_mb": float(sizes.max()),
                    "growth_mb_per_minute": growth,
                }
            )
        return found


def run(args: argparse.Namespace) -> int:
    options = DEFAULTS | engine_kwargs(args, leave_out=("seed",))
    if args.chaos:
        from quire.bench.internal.soak.chaos import run_chaos

        return run_chaos(args, options)
    with serving(options, ["--enable-admin", *shlex.split(args.server_args)]) as child:
        memory = Memory(server_processes(child.process.pid))
        target = Target(child.url, timeout=120)
        began = time.perf_counter()
        tally, state = asyncio.run(_soak(args, target, memory))
        seconds = time.perf_counter() - began
        problems = _problems(args, tally, state, memory, child)

    growth_report = memory.growth_report(args.warm_up)
    metrics = [
        Metric("requests", "/s", [tally.sent / seconds]),
        Metric("output", "tok/s", [tally.output_tokens / seconds]),
        *(
            Metric(f"{one['role']} memory growth", "MB/min", [one["growth_mb_per_minute"]], lower_is_better=True)
            for one in growth_report
            if one["growth_mb_per_minute"] is not None
        ),
    ]
    details = {
        "sent": tally.sent,
        "outcomes": dict(tally.outcomes),
        "failures": dict(tally.failures),
        "memory": growth_report,
        "memory_samples": {
            "seconds": [round(at, 2) for at in memory.times],
            "resident_mb": [[round(size / MEGABYTE, 2) for size in row] for row in memory.resident],
        },
        "state_afterwards": state,
        "problems": problems,
    }
    workload = {"minutes": args.minutes, "concurrency": args.concurrency, "disconnects": args.disconnects}
    report = Report("soak", workload, options, describe_machine(False), metrics, details=details)
    print(report.as_json() if args.json else _text(report, details))
    if args.result_file:
        Path(args.result_file).write_text(report.as_json() + "\n", "utf-8")
    return 1 if problems else 0


async def _soak(args: argparse.Namespace, target: Target, memory: Memory) -> tuple[Tally, dict[str, Any]]:
    traffic = Traffic(target, args.seed, args.disconnects)
    stop = asyncio.Event()
    began = time.perf_counter()
    task = asyncio.create_task(traffic.run(args.concurrency, stop))
    asyncio.get_running_loop().call_later(60 * args.minutes, stop.set)
    while not task.done():
        memory.sample(time.perf_counter() - began)
        await asyncio.wait({task}, timeout=args.sample_seconds)
    await task
    state = await _idle_state(target)
    memory.sample(time.perf_counter() - began)
    return traffic.tally, state


async def _idle_state(target: Target) -> dict[str, Any]:
    """The server's state once it holds nothing, or after IDLE_SECONDS."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        state = await read_state(target)
        if not leftovers(state) or time.monotonic() > deadline:
            return state
        await asyncio.sleep(0.1)


async def read_state(target: Target) -> dict[str, Any]:
    status, body = await fetch(target, "GET", "/server_info")
    if status != 200:
        raise ValueError(f"/server_info returns status {status}")
    state: dict[str, Any] = json.loads(body)["state"]
    return state


def leftovers(state: dict[str, Any]) -> list[str]:
    core = state["core"]
    held = {f"{part} {name}": n for part in state for name, n in state[part].items() if not name.startswith("blocks")}
    found = [f"{n} left: {name}" for name, n in held.items() if n]
    if core["blocks_free"] != core["blocks"]:
        found.append(f"{core['blocks'] - core['blocks_free']} of {core['blocks']} blocks are not free")
    return found


def _problems(
    args: argparse.Namespace, tally: Tally, state: dict[str, Any], memory: Memory, child: ServerChild
) -> list[str]:
    found = [f"{count} x {why}" for why, count in tally.failures.items()] + leftovers(state)
    if sum(tally.outcomes.values()) != tally.sent:
        found.append(f"{tally.sent} requests were sent, {sum(tally.outcomes.values())} accounted for")
    if child.process.poll() is not None:
        found.append(f"the server ended with exit code {child.process.returncode}")
    tracebacks = child.log.read_text("utf-8", "replace").count("Traceback (most recent call last)")
    if tracebacks:
        found.append(f"{tracebacks} tracebacks in the server's log:\n{child.log_tail()}")
    for one in memory.growth_report(args.warm_up):
        growth = one["growth_mb_per_minute"]
        if growth is not None and growth > args.max_growth:
            limit = f"--max-growth {args.max_growth:g}"
            found.append(f"the {one['role']} process grew by {growth:.2f} MB a minute ({limit})")
    return found


def _text(report: Report, details: dict[str, Any]) -> str:
    lines = [report.as_text(), f"  sent {details['sent']}: {details['outcomes']}"]
    for one in details["memory"]:
        lines.append(
            f"  {one['role']}: {one['first_mb']:.1f} MB at first, {one['after_warm_up_mb']:.1f} after the warm-up, "
            f"{one['last_mb']:.1f} at last"
        )
    lines.append(f"  afterwards: {details['state_afterwards']}")
    lines += [f"  PROBLEM: {problem}" for problem in details["problems"]] or ["  nothing leaked"]
    return "\n".join(lines)
