"""Tokens per second that one API process can stream: the whole HTTP server on an engine without a model.

The client is another process that only counts events. One event per token, detokenization included.

    python -m quire.bench.internal.frontend --streams 64 --tokens 2000
"""

import asyncio
import cProfile
import multiprocessing
import multiprocessing.connection
import pstats
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.common import positive
from quire.bench.internal.stub_engine import StubEngine, cycle
from quire.bench.machine import describe_machine
from quire.bench.report import Metric, Report
from quire.config.flags import FlagParser
from quire.config.server import ServerConfig
from quire.entrypoints.http.app import build_app
from quire.entrypoints.http.server import Server, bind

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WARM_UP_TOKENS = 200
ROUND_SECONDS = 120


def parser() -> FlagParser:
    parser = FlagParser(prog="quire bench frontend", description="Tokens per second of one API process.")
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="at once (default: 64)")
    parser.add_argument("--tokens", type=positive, default=2000, metavar="N", help="per stream (default: 2000)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="rounds to measure (default: 3)")
    parser.add_argument("--api", choices=tuple(PATHS), default="chat", help="which endpoint (default: chat)")
    parser.add_argument("--profile", action="store_true", help="print a profile; slows it down")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


@dataclass
class Round:
    """Totals of all streams; times in seconds."""

    tokens: int
    wall: float
    cpu: float
    steps: float  # of the stub engine and output processing; part of `cpu`


class TimedEngine(StubEngine):
    step_time = 0.0

    def step(self) -> None:
        began = time.perf_counter()
        super().step()
        self.step_time += time.perf_counter() - began


def run(args: Namespace) -> int:
    engine = TimedEngine(cycle([]))
    assert engine.tokenizer is not None
    rng = np.random.default_rng(0)
    plain = [i for i in range(engine.tokenizer.vocab_size) if engine.tokenizer.token_bytes(i).isascii()]
    ordinary = [i for i in plain if i not in engine.tokenizer.special_ids]  # each is a whole text, so each is an event
    engine.rule = cycle(rng.choice(ordinary, 4096).tolist())
    config = ServerConfig(port=0, access_log=False)
    profile = cProfile.Profile() if args.profile else None
    rounds = measure(engine, config, args, profile)
    metrics = [
        Metric("tokens", "/s", [one.tokens / one.wall for one in rounds]),
        Metric("wall per token", "us", [1e6 * one.wall / one.tokens for one in rounds], lower_is_better=True),
        Metric("cpu per token", "us", [1e6 * one.cpu / one.tokens for one in rounds], lower_is_better=True),
        Metric("of it engine steps", "us", [1e6 * one.steps / one.tokens for one in rounds], lower_is_better=True),
    ]
    workload = {"api": args.api, "streams": args.streams, "tokens": args.tokens}
    report = Report("frontend", workload, {}, describe_machine(False), metrics)
    print(report.as_json() if args.json else report.as_text())
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


def measure(
    engine: TimedEngine, config: ServerConfig, args: Namespace, profile: cProfile.Profile | None
) -> list[Round]:
    sock = bind(config)
    near, far = multiprocessing.get_context("spawn").Pipe()
    address = sock.getsockname()[:2]
    client = multiprocessing.get_context("spawn").Process(target=drive, args=(far, address, PATHS[args.api]))
    rounds: list[Round] = []

    def client_result() -> tuple[int, float]:
        if not near.poll(ROUND_SECONDS):
            raise TimeoutError(f"the client did not finish within {ROUND_SECONDS} s")
        return near.recv()

    async def run_client() -> None:
        try:
            await rounds_of_client()
        finally:
            server.should_exit = True
            client.terminate()

    async def rounds_of_client() -> None:
        in_thread = asyncio.to_thread
        await in_thread(client.start)
        near.send((args.streams, WARM_UP_TOKENS))
        await in_thread(client_result)
        for _ in range(args.repeat):
            steps, cpu = engine.step_time, time.process_time()
            if profile is not None:
                profile.enable()
            near.send((args.streams, args.tokens))
            events, wall = await in_thread(client_result)
            if profile is not None:
                profile.disable()
            cpu = time.process_time() - cpu
            expected = args.streams * args.tokens
            assert events == expected, f"{events} events for {expected} tokens: some were merged or lost"
            rounds.append(Round(expected, wall, cpu, engine.step_time - steps))

    tasks: list[asyncio.Task[None]] = []
    server = Server(
        build_app(engine, config, engine.config),
        config,
        ready=lambda: tasks.append(asyncio.get_running_loop().create_task(run_client())),
    )
    server.run(sockets=[sock])
    client.join(10)
    tasks[0].result()
    return rounds


# The client's process


class Counter(asyncio.Protocol):
    """Counts events with text, and detects the end of the stream."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]  # uvloop's is no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b'"finish_reason":')  # a chunk is one write, never split
        self.tail = (self.tail + data)[-32:]
        if b"[DONE]" in self.tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


def drive(pipe: multiprocessing.connection.Connection, address: tuple[str, int], path: str) -> None:
    import uvloop

    while True:
        pipe.send(uvloop.run(one_round(address, path, *pipe.recv())))


async def one_round(address: tuple[str, int], path: str, streams: int, tokens: int) -> tuple[int, float]:
    import msgspec

    loop = asyncio.get_running_loop()
    protocols: list[Counter] = []
    began = time.perf_counter()
    transports = []
    for i in range(streams):
        message = {"role": "user", "content": "Hello " * (i + 1)}
        what: dict[str, Any] = {"messages": [message]} if "chat" in path else {"prompt": "Hello " * (i + 1)}
        body = msgspec.json.encode({**what, "max_tokens": tokens, "ignore_eos": True, "stream": True})
        headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode()
        transport, protocol = await loop.create_connection(lambda r=head + body: Counter(r), *address)  # type: ignore[misc]
        transports.append(transport)
        protocols.append(protocol)
    await asyncio.gather(*(protocol.done for protocol in protocols))
    wall = time.perf_counter() - began
    for transport in transports:
        transport.close()
    roles = streams if "chat" in path else 0  # the first event of a chat carries no text
    return sum(protocol.events for protocol in protocols) - roles, wall


if __name__ == "__main__":
    sys.exit(run(parser().parse(sys.argv[1:])))
