"""Embeddings over HTTP with many clients: texts per second and latency, of a server of ours or of another's.

    python benchmarks/cpu/embeddings_http.py MODEL [--output FILE.json]    # starts `quire serve MODEL`
    python benchmarks/cpu/embeddings_http.py --url http://127.0.0.1:8001   # any OpenAI-compatible server

For a comparison name the other server too, `MODEL --url http://127.0.0.1:8001`; rounds alternate between them. A figure
is the median of the rounds; the ratios are ours to the other's.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

WORDS = ("the", "a", "of", "to", "and", "in", "that", "it", "was", "his", "he", "she", "with", "as", "on", "for")


def texts(count: int, length: int, seed: int = 0) -> list[str]:
    """Words that are one token each in most vocabularies."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=length)) for _ in range(count)]


@contextlib.contextmanager
def served(model: str, flags: list[str]) -> Iterator[str]:
    port = 8377
    command = [sys.executable, "-m", "quire", "serve", model, "--port", str(port), "--no-access-log", *flags]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Connection:
    """HTTP by hand, on a connection that stays open. The clients share the cores with the server: of httpx a request
    costs 5 ms there with 64 connections in a pool, more than the server's work for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status, *headers = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        sizes = [int(line.partition(":")[2]) for line in headers if line.startswith("content-length:")]
        answer = await self.reader.readexactly(*sizes)
        if status.split()[1] != "200":
            raise RuntimeError(f"{status}: {answer[:500]!r}")

    async def close(self) -> None:
        self.writer.close()


class Pooled:
    """Of httpx, whose pool of as many connections is shared by all clients."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, body: bytes) -> None:
        response = await self.client.post(path, content=body, headers={"Content-Type": "application/json"})
        response.raise_for_status()

    async def close(self) -> None:
        await self.client.aclose()


async def connect(url: str, clients: int, kind: str) -> list[Connection] | list[Pooled]:
    if kind == "plain":
        return [await Connection.open(url) for _ in range(clients)]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    return [Pooled(httpx.AsyncClient(base_url=url, timeout=600, limits=limits))] * clients


async def measure(
    url: str, clients: int, requests: int, batch: int, length: int, encoding: str, kind: str = "plain"
) -> dict[str, float]:
    """`requests` in all, spread over the clients; each holds `batch` texts."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    every = texts(requests * batch, length)
    queue = [
        json.dumps({"model": model, "input": every[i * batch : (i + 1) * batch], "encoding_format": encoding}).encode()
        for i in reversed(range(requests))
    ]
    connections = await connect(url, clients, kind)
    seconds: list[float] = []

    async def work(connection: Connection | Pooled) -> None:
        while queue:
            began = time.perf_counter()
            await connection.post("/v1/embeddings", queue.pop())
            seconds.append(time.perf_counter() - began)

    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(work, connections))
    total, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    for connection in set(connections):
        await connection.close()
    return {
        "texts/s": requests * batch / total,
        "median ms": 1e3 * float(np.median(seconds)),
        "p99 ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "client's CPU ms a text": 1e3 * cpu / requests / batch,
    }


def show(row: dict[str, Any]) -> None:
    medians = {
        url: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for url, rounds in row["servers"].items()
    }
    for url, figures in medians.items():
        shown = ", ".join(f"{value:.1f} {name}" for name, value in figures.items())
        print(f"{url}  {row['clients']} clients, {row['texts']} x {row['words']} words: {shown}", flush=True)
    *others, ours = (figures["texts/s"] for figures in medians.values())
    for other in others:
        print(f"  {ours / other:.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="served by `quire serve` for the run")
    parser.add_argument("--url", action="append", default=[], help="a running server; may be repeated")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--client", default="plain", choices=("plain", "httpx"), help="what speaks HTTP in the clients")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="texts in a request")
    parser.add_argument("--length", type=int, nargs="+", default=[16, 128, 256], help="words in a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encoding", default="base64", choices=("base64", "float"))
    parser.add_argument("--flags", default="", help="of `quire serve`")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        urls = list(args.url)
        if args.model:
            urls.append(stack.enter_context(served(args.model, args.flags.split())))
        if not urls:
            parser.error("name a model or a --url")
        rows: list[dict[str, Any]] = []
        for url in urls:
            asyncio.run(measure(url, args.clients, args.clients, 1, 16, args.encoding))  # warm
        for batch in args.batch:
            for length in args.length:
                requests = max(args.clients, args.requests // batch)
                found: dict[str, list[dict[str, float]]] = {url: [] for url in urls}
                for _ in range(args.rounds):
                    for url in urls:
                        sizes = (args.clients, requests, batch, length)
                        found[url].append(asyncio.run(measure(url, *sizes, args.encoding, args.client)))
                row = {"clients": args.clients, "texts": batch, "words": length, "servers": found}
                rows.append(row)
                show(row)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
