"""What watching costs: throughput of a server under load with and without clients that read its live view.

    python -m benchmarks.page_view [--streams 64] [--watchers 2] [--rounds 10] [--save FILE.json] [MODEL]

Rounds alternate between watched and not, on one server, in an order that is reversed every other time; the figure is
the median of the ratios of neighbours. A client that reads the stream stands for a browser.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from quire.bench.machine import describe_machine

WORDS = ["paper", "ink", "page", "block", "token", "engine", "river", "stone", "light", "north", "cloud", "seven"]


@contextmanager
def serving(model: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "quire", "serve", *model, "--port", "0", "--no-access-log"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout)
        url = next(found[1] for line in lines if (found := re.search(r"serving .* at (http\S+)", line)))
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        yield url
    finally:
        process.terminate()
        process.wait(60)


def generate(url: str, streams: int, tokens: int) -> float:
    """Tokens per second of all streams together."""
    counts = [0] * streams

    def one(i: int) -> None:
        prompt = " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(32 + i))
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "seed": i}
        body = {"prompt": prompt, "max_tokens": tokens, **options}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=3600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if '"usage":{' in line:
                    counts[i] = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


@contextmanager
def watching(url: str, watchers: int) -> Iterator[list[int]]:
    """Clients that read the view; how many samples each got."""
    ended, samples = threading.Event(), [0] * watchers

    def one(i: int) -> None:
        with httpx.stream("GET", f"{url}/view/stream", timeout=60) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                samples[i] += line.startswith("data: ")
                if ended.is_set():
                    return

    threads = [threading.Thread(target=one, args=(i,)) for i in range(watchers)]
    for thread in threads:
        thread.start()
    try:
        yield samples
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the embedded one")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--watchers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further pair begins")
    parser.add_argument("--save", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    began = time.monotonic()
    with serving([args.model] if args.model else []) as url:
        generate(url, args.streams, min(32, args.tokens))  # warm-up
        pairs: list[dict[str, float]] = []
        for number in range(args.rounds):
            if time.monotonic() - began > args.seconds:
                break
            rates: dict[bool, float] = {}
            seen = 0
            for watched in (False, True) if number % 2 == 0 else (True, False):
                with watching(url, args.watchers if watched else 0) as samples:
                    rates[watched] = generate(url, args.streams, args.tokens)
                seen = max(samples, default=seen)
            pairs.append({"alone": rates[False], "watched": rates[True], "samples": seen})
            print(
                f"{number + 1}: {rates[False]:.1f} tokens/s, watched {rates[True]:.1f}, {seen} samples: "
                f"{100 * (rates[True] / rates[False] - 1):+.2f} %",
                flush=True,
            )
    ratios = [pair["watched"] / pair["alone"] for pair in pairs]
    first, middle, third = (100 * (part - 1) for part in statistics.quantiles(ratios, n=4))
    print(
        f"{args.watchers} watchers, {args.streams} streams: {middle:+.2f} % (quartiles {first:+.2f} and {third:+.2f} %)"
    )
    if args.save is not None:
        shape = {"streams": args.streams, "watchers": args.watchers, "tokens": args.tokens, "pairs": pairs}
        shape |= {"percent": [first, middle, third], "machine": describe_machine(probe=False)}
        args.save.write_text(json.dumps(shape, indent=1) + "\n")


if __name__ == "__main__":
    main()
