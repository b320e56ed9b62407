"""Times an all-reduce among processes of this machine: over shared memory, and over gloo.

    python -m benchmarks.collectives [--ranks 2 4] [--rows 1 256] [--width 1024] [--repeats 500] [--output FILE]

The figure is the median of what the first rank waits, in microseconds; each rank has one thread.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from quire.bench.machine import describe_machine
from quire.distributed.layout import WorldLayout
from quire.distributed.world import World

WAIT = 60.0


def measure(
    rank: int, size: int, address: str, share_memory: bool, rows: list[int], width: int, repeats: int, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    world = World.connect(rank, WorldLayout(tensor=size), address, "gloo", WAIT, share_memory=share_memory)
    found = []
    for count in rows:
        x = torch.zeros(count, width, dtype=torch.bfloat16)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            world.tensor.all_reduce(x)
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times) * 1e6)
    if rank == 0:
        pipe.send(found)
    world.close()


def medians(size: int, share_memory: bool, rows: list[int], width: int, repeats: int) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    settings = (size, address, share_memory, rows, width, repeats, theirs)
    ranks = [context.Process(target=measure, args=(rank, *settings), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    theirs.close()
    found: list[float] = ours.recv()
    for process in ranks:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    results = []
    for size in chosen.ranks:
        for name, share_memory in (("shared memory", True), ("gloo", False)):
            found = medians(size, share_memory, chosen.rows, chosen.width, chosen.repeats)
            for rows, median in zip(chosen.rows, found, strict=True):
                print(f"{size} ranks, {rows} x {chosen.width} bf16, {name}: {median:.1f} us", flush=True)
                results.append({"ranks": size, "rows": rows, "width": chosen.width, "by": name, "median_us": median})
    if chosen.output is not None:
        facts = {"machine": describe_machine(probe=False), "results": results}
        chosen.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
