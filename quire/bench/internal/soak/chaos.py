"""`quire bench soak --chaos`: the mixed traffic while processes are killed and stopped, clients misbehave, and the
wall clock is stepped.

It fails, with exit code 1, if a request hangs or is unaccounted for, if a response belongs to another request, or if a
process, a file or a descriptor leaks.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from quire.bench.internal.soak.probe import Probe
from quire.bench.internal.soak.server import ChaosServer, Conditions, temporary_folder
from quire.bench.internal.soak.traffic import COMPLETIONS, TEXT, SoakRequest, Traffic
from quire.bench.machine import describe_machine
from quire.bench.report import Metric, Report
from quire.bench.serve_client import Target

REQUEST_SECONDS = 90.0  # a request still open by then counts as hanging
REST_SECONDS = 60.0
RETRY_SECONDS = 0.5  # for clients while the server is down
START_SHARE = 0.3  # share of actions that are run during a start instead of being skipped
CLOCK_STEPS = (0, 3600, -3600, 86_400, -86_400, 10 * 365 * 86_400, -5 * 365 * 86_400)
CROWD = 200  # connections that send nothing
LONG = {"prompt": TEXT, "max_tokens": 900, "ignore_eos": True, "stream": True}


class ChaosTraffic(Traffic):
    """Requests may end with an error or a closed connection, but must not hang or get a wrong response."""

    async def send(self, request: SoakRequest) -> None:
        before = self.tally.outcomes["unreachable"]
        await super().send(request)
        if self.tally.outcomes["unreachable"] > before:
            await asyncio.sleep(RETRY_SECONDS)

    def _record_failure(self, why: str) -> None:
        if why == "timeout":
            self.tally.record("failed", why)
        else:
            self.tally.record("unreachable" if why.startswith("ConnectionRefusedError") else "ended")

    def _check_response(self, request: SoakRequest, status: int, reader: Any, whole: bytes) -> None:
        cut = request.stream and status == 200 and (reader.error is not None or not reader.finished)
        if cut or status in (503, 504):
            self.tally.record("ended")
        else:
            super()._check_response(request, status, reader, whole)


class Chaos:
    """Actions against the server, in an order given by a seed."""

    def __init__(self, server: ChaosServer, rng: random.Random, descriptors: int) -> None:
        self.server = server
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.events: list[tuple[float, str]] = []  # seconds after the start, and the action
        self._began = time.perf_counter()
        self.calm = asyncio.Event()  # set at the end: no more actions
        self._clients: set[asyncio.Task[None]] = set()
        self._conditions = (
            Conditions("fair"),
            Conditions("two API processes", api_servers=2),
            Conditions("few descriptors", descriptors=descriptors),
            Conditions("full disk", full_disk=True),
            Conditions("two API processes, few descriptors", api_servers=2, descriptors=descriptors),
        )
        self._order: list[Conditions] = []
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill engine": lambda: self._kill("engine"),
            "kill API": lambda: self._kill("api"),
            "kill main": lambda: self._kill("main"),
            "terminate": self._terminate,
            "stop engine": lambda: self._stop("engine"),
            "stop API": lambda: self._stop("api"),
            "slow clients": self._slow_clients,
            "clients that never read": self._clients_that_never_read,
            "crowd": self._crowd,
        }
        if server.clock.available:
            actions["clock step"] = self._step_clock
        self._actions = actions
        self._next: list[str] = []

    def conditions(self) -> Conditions:
        """Each once before any repeats."""
        if not self._order:
            self._order = self.rng.sample(self._conditions, len(self._conditions))
        return self._order.pop()

    async def keep_running(self) -> None:
        """Restart the server whenever it has exited."""
        while not self.calm.is_set():
            if not self.server.running:
                await asyncio.to_thread(self.restart)
            await asyncio.sleep(0.05)

    def restart(self) -> None:
        self.server.wait()
        conditions = self.conditions()
        self._log_event(f"start: {conditions.name}")
        self.server.start(conditions)
        self._log_event("healthy" if self.server.running else "exited during start")

    def _log_event(self, event: str) -> None:
        self.events.append((round(time.perf_counter() - self._began, 2), event))

    async def run(self, interval: float) -> None:
        """An action about every `interval` seconds, each once before any repeats."""
        while not self.calm.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.calm.wait(), interval * self.rng.uniform(0.5, 1.5))
            if self.calm.is_set() or not self.server.running:
                continue
            if not self.server.healthy and self.rng.random() > START_SHARE:
                continue
            if not self._next:
                self._next = self.rng.sample(list(self._actions), len(self._actions))
            name = self._next.pop()
            self._log_event(name)
            with contextlib.suppress(ProcessLookupError):  # it exited by itself
                await self._actions[name]()
                self.done[name] += 1

    async def end(self) -> None:
        self.calm.set()
        self.server.clock.step(0)
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _kill(self, role: str) -> None:
        self.server.send(role, signal.SIGKILL)

    async def _terminate(self) -> None:
        self.server.send("main", signal.SIGTERM)

    async def _stop(self, role: str) -> None:
        stopped = self.server.send(role, signal.SIGSTOP)
        if stopped is not None:
            await asyncio.sleep(self.rng.uniform(0.5, 4))
            self.server.send_to(stopped, signal.SIGCONT)

    async def _step_clock(self) -> None:
        self.server.clock.step(self.rng.choice(CLOCK_STEPS))

    async def _slow_clients(self) -> None:
        for _ in range(4):
            self._start_client(self._read_slowly(seconds=15))

    async def _clients_that_never_read(self) -> None:
        for _ in range(4):
            self._start_client(self._hold(self.server.target.message("POST", COMPLETIONS, LONG), seconds=10))

    async def _crowd(self) -> None:
        for _ in range(CROWD):
            self._start_client(self._hold(b"", seconds=3))

    def _start_client(self, client: Any) -> None:
        task = asyncio.create_task(client)
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _read_slowly(self, seconds: float) -> None:
        """Read a byte per second, then disconnect."""
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1)
            try:
                writer.write(self.server.target.message("POST", COMPLETIONS, LONG))
                async with asyncio.timeout(seconds):
                    while await reader.read(1):
                        await asyncio.sleep(1)
            finally:
                writer.transport.abort()

    async def _hold(self, message: bytes, seconds: float) -> None:
        """Send, never read, then disconnect."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1)
            try:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(message)
                await asyncio.sleep(seconds)
            finally:
                writer.transport.abort()


def run_chaos(args: argparse.Namespace, options: dict[str, Any]) -> int:
    options = {"dtype": "float32"} | options  # greedy tokens then do not depend on the batch size
    rng = random.Random(args.chaos_seed)
    with temporary_folder() as folder:
        server = ChaosServer(options, shlex.split(args.server_args), Path(folder))
        try:
            server.start(Conditions("fair"))
            began = time.perf_counter()
            details = asyncio.run(_run(args, server, rng))
            seconds = time.perf_counter() - began
            server.check_descriptors()
        finally:
            server.stop()
        server.check_leftovers()
        details["problems"] += server.problems
        details["starts"] = server.starts
        details["wall_clock"] = "stepped" if server.clock.available else "not stepped: there is no C compiler"
    if details["problems"]:
        details["log"] = details["log"].splitlines()[-200:]
    else:
        del details["log"]
    metrics = [Metric("requests", "/s", [details["sent"] / seconds])]
    workload = {"minutes": args.minutes, "concurrency": args.concurrency, "disconnects": args.disconnects}
    workload |= {"chaos_interval": args.chaos_interval, "chaos_seed": args.chaos_seed}
    report = Report("soak with chaos", workload, options, describe_machine(False), metrics, details=details)
    print(report.as_json() if args.json else _text(report, details))
    if args.result_file:
        Path(args.result_file).write_text(report.as_json() + "\n", "utf-8")
    return 1 if details["problems"] else 0


async def _run(args: argparse.Namespace, server: ChaosServer, rng: random.Random) -> dict[str, Any]:
    target = Target(server.target.url, timeout=REQUEST_SECONDS)
    probe = Probe(target)
    await probe.learn()
    traffic = ChaosTraffic(target, args.seed, args.disconnects)
    chaos = Chaos(server, rng, args.chaos_descriptors)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(60 * args.minutes, stop.set)

    async def use() -> None:
        await asyncio.gather(traffic.run(args.concurrency, stop), probe.run(stop))

    users = asyncio.create_task(use())
    keeper = asyncio.create_task(chaos.keep_running())
    agent = asyncio.create_task(chaos.run(args.chaos_interval))
    try:
        await asyncio.wait({users, keeper, agent}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        await chaos.end()
        await asyncio.gather(keeper, agent)
    await users
    problems, state = await _at_rest(chaos, target)
    tally = traffic.tally
    problems += [f"{count} x {why}" for why, count in tally.failures.items()] + probe.problems()
    if sum(tally.outcomes.values()) != tally.sent:
        problems.append(f"{tally.sent} requests were sent, {sum(tally.outcomes.values())} accounted for")
    return {
        "sent": tally.sent + probe.sent,
        "outcomes": dict(tally.outcomes),
        "probes": dict(probe.outcomes),
        "chaos": dict(chaos.done),
        "events": chaos.events,
        "state_afterwards": state,
        "problems": problems,
        "log": server.log(),
    }


async def _at_rest(chaos: Chaos, target: Target) -> tuple[list[str], dict[str, Any]]:
    """What the last server still holds when idle. It may be about to exit from the last action."""
    from quire.bench.internal.soak.command import leftovers, read_state

    deadline = time.monotonic() + REST_SECONDS
    while True:
        if not chaos.server.running:
            await asyncio.to_thread(chaos.restart)
            deadline = time.monotonic() + REST_SECONDS
        try:
            state = await read_state(target)
        except (OSError, ValueError) as error:
            found, state = [f"the server does not respond: {error}"], {}
        else:
            found = leftovers(state)
        if not found or time.monotonic() > deadline:
            return found, state
        await asyncio.sleep(0.1)


def _text(report: Report, details: dict[str, Any]) -> str:
    lines = [report.as_text(), f"  sent {details['sent']}: {details['outcomes']}, probes: {details['probes']}"]
    lines.append(f"  chaos: {json.dumps(details['chaos'])}, {details['starts']} starts, clock {details['wall_clock']}")
    lines.append(f"  afterwards: {details['state_afterwards']}")
    lines += [f"  PROBLEM: {problem}" for problem in details["problems"]]
    if not details["problems"]:
        lines.append("  nothing was lost, mixed up or leaked")
    return "\n".join(lines)
