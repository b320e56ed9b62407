"""What the peers' scripts share: the card's figures, a fresh process per engine, the HTTP rows, and the table.

Nothing here needs more than the standard library: it runs in environments that Quire is not installed in. The HTTP rows
are sent by `quire bench serve` from Quire's own environment, so that every server meets the same client.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from quire.bench.workloads import CPU_SHAPES, Shape, Workload, cpu_workload, random_workload

FIRST_PROMPT = Workload([list(range(100, 228))], [1])
WARM_UP = random_workload("warm-up", 0, Shape(requests=4, own=64, output=16))
WORKLOADS = tuple(CPU_SHAPES)
ROWS = {
    "start": "process start to first token, s",
    "ttft": "1 request 128/128: time to first token, ms",
    "decode": "1 request 128/128: decode tok/s",
    "throughput": "64 requests 128/128: output tok/s",
    "prefix": "64 requests, common 1,024 + 32 own, 32 out: s",
    "prefill": "8 requests 1,024/1: prompt tok/s",
    "healthy": "server start to /health, s",
}
SERVING = {"cpu-at-once": "HTTP, 100 requests 128/64 at once", "cpu-4": "HTTP, 4 per s"}
METRICS = {"output": "output tok/s", "ttft_p50": "TTFT p50 ms", "ttft_p99": "TTFT p99 ms"}
METRICS |= {"tpot_p50": "TPOT p50 ms", "tpot_p99": "TPOT p99 ms"}
ROWS |= {f"{row} {metric}": f"{SERVING[row]}: {METRICS[metric]}" for row in SERVING for metric in METRICS}
START_UP_SECONDS = 600

Seconds = Callable[[Workload], float]  # of one blocking call that finds no prompt in a cache


@dataclass
class Column:
    """One engine in one setting: the values of each row, one per repetition."""

    name: str
    options: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figures: dict[str, float]) -> None:
        for key, value in figures.items():
            self.values.setdefault(key, []).append(value)
            print(f"[{self.name}] {ROWS[key]}: {value:,.4g}", flush=True)


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, metavar="FILE", help="write JSON there")
    made.add_argument("--repetitions", type=int, default=3, help="to take medians of (default: 3)")
    made.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="(default: all)")
    made.add_argument("--rows", nargs="*", choices=SERVING, default=list(SERVING), help="over HTTP (default: both)")
    made.add_argument("--quire", metavar="FILE", help="Quire's command, the HTTP client; without it no HTTP rows")
    return made


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns, called with the time at which its process was started and `args`."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, time.time(), *args).result()


def measure(seconds: Seconds, name: str, repetition: int) -> dict[str, float]:
    workload = cpu_workload(name, repetition)
    if name == "latency":
        first = seconds(replace(workload, output_lens=[1]))
        return {"ttft": 1e3 * first, "decode": (workload.num_output_tokens - 1) / (seconds(workload) - first)}
    took = seconds(workload)
    if name == "prefix":
        return {name: took}
    return {name: (workload.num_prompt_tokens if name == "prefill" else workload.num_output_tokens) / took}


def measure_all(column: Column, seconds: Seconds, started: float, workloads: Sequence[str], repetitions: int) -> None:
    """An engine just made, by a process `started` then: its first token, a warm-up, and every workload."""
    seconds(FIRST_PROMPT)
    column.add({"start": time.time() - started})
    seconds(WARM_UP)
    for name in workloads:
        for repetition in range(repetitions):
            column.add(measure(seconds, name, repetition))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def serving(column: Column, command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server as soon as it is healthy; `command` is given its port last."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen([*command, str(port)], stdout=log, stderr=log, env=environment)
        try:
            while not _healthy(url):
                late = time.perf_counter() - began > START_UP_SECONDS
                if late or process.poll() is not None:
                    log.seek(0)
                    raise ValueError(f"the server did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.02)
            column.add({"healthy": time.perf_counter() - began})
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def bench_serve(quire: str, url: str, *words: str) -> dict[str, Any]:
    """One `quire bench serve` against a running server: its report."""
    command = [quire, "bench", "serve", "--base-url", url, "--json", "--metric-percentiles", "50,99", *words]
    # The client is Quire's own: without the libraries that the peer is given.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}{done.stdout[-2000:]}")
    report = json.loads(done.stdout)
    wanted = report["workload"].get("output_len")
    for run in report["details"]["runs"]:
        if wanted and run["output_tokens"] != run["completed"] * wanted:
            raise ValueError(f"{run['output_tokens']} tokens from {run['completed']} requests of {wanted}")
    return report


def warm_up_server(quire: str, url: str) -> None:
    shape = ["--num-prompts", "64", "--random-input-len", "128", "--random-output-len", "32"]
    bench_serve(quire, url, *shape, "--ignore-eos", "--seed", "0")


def measure_rows(column: Column, quire: str, url: str, rows: Sequence[str], repetitions: int) -> None:
    """The reference numbers' serving rows, with fresh prompts each."""
    for seed, row in enumerate(rows, start=1):
        report = bench_serve(quire, url, "--row", row, "--seed", str(seed), "--repetitions", str(repetitions))
        for i in range(repetitions):
            column.add({f"{row} {metric}": report["metrics"][metric]["values"][i] for metric in METRICS})


def over_http(quire: str, url: str) -> Seconds:
    """Seconds of a workload's requests sent at once, from the first connection to the last answer's end."""

    def seconds(workload: Workload) -> float:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "prompts.jsonl")
            pairs = zip(workload.prompts, workload.output_lens, strict=True)
            file.write_text("".join(json.dumps({"prompt": p, "output_tokens": n}) + "\n" for p, n in pairs), "utf-8")
            words = ["--dataset-name", "custom", "--dataset-path", str(file), "--ignore-eos", "--no-warm-up"]
            run = bench_serve(quire, url, *words)["details"]["runs"][0]
        if run["output_tokens"] != workload.num_output_tokens:
            raise ValueError(f"{run['output_tokens']} tokens instead of {workload.num_output_tokens}")
        return run["duration_s"]

    return seconds


def report(columns: Sequence[Column], facts: dict[str, Any], output: Path | None) -> None:
    facts = {"machine": {"cpu": _cpu_name(), "python": platform.python_version()}} | facts
    width = max(map(len, ROWS.values()))
    for column in columns:
        print(f"\n{column.name}: {facts}")
        for key, values in column.values.items():
            spread = f"  ({min(values):,.4g} to {max(values):,.4g})" if len(values) > 1 else ""
            print(f"  {ROWS[key]:<{width}}  {statistics.median(values):>9,.4g}{spread}")
    if output is None:
        return
    made = {
        c.name: {"options": c.options}
        | {key: {"median": statistics.median(values), "values": values} for key, values in c.values.items()}
        for c in columns
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(facts | {"columns": made}, indent=1) + "\n", "utf-8")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
