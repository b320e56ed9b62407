"""How long a plan takes to idle workers, from the scheduler's object to theirs: python -m benchmarks.broadcast"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import zmq

from quire.distributed.broadcast_ring import Ring, RingReader, RingWriter
from quire.executor.worker_messages import Execute, Stop, ToWorker, WritableCodec
from quire.messages.plan import BlockAppends, SchedulerOutput
from quire.messages.protocol import Codec

IDLE_SECONDS = 0.005  # between plans: readers sleep by then


def decode_plan(rows: int) -> SchedulerOutput:
    """Every row decodes, and every 16th gets a block."""
    some = list(range(0, rows, 16))
    return SchedulerOutput(
        step=1,
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=np.ones(rows, np.int32),
        finished_rows=[],
        new_rows=[],
        appended=BlockAppends(some, [0] * len(some), some, some),
        block_copies=[],
        common_prefix_blocks=(0,),
    )


def read(fd: int, reader: int, readers: int, folder: str) -> None:
    """A worker's part: says when it had each plan."""
    overflow = zmq.Context().socket(zmq.PULL)
    overflow.connect(f"ipc://{folder}/{reader}")
    ring, codec = RingReader(Ring(readers, fd=fd), reader, overflow), WritableCodec(ToWorker)
    print("ready", flush=True)
    times = []
    while True:
        frames = ring.read(60.0)
        if frames is not None and isinstance(codec.decode(frames), Stop):
            break
        times.append(time.perf_counter())
    print(*times, flush=True)


def measure(readers: int, rows: int, plans: int) -> list[list[float]]:
    """For each plan, seconds until each worker had it."""
    ring, context, codec = Ring(readers), zmq.Context(), Codec()
    with tempfile.TemporaryDirectory() as folder:
        sockets = [context.socket(zmq.PUSH) for _ in range(readers)]
        for number, socket in enumerate(sockets):
            socket.bind(f"ipc://{folder}/{number}")
        command = [sys.executable, "-m", "benchmarks.broadcast", "--fd", str(ring.fd), "--folder", folder]
        command += ["--readers", str(readers), "--reader"]
        processes = [
            subprocess.Popen([*command, str(number)], pass_fds=[ring.fd], stdout=subprocess.PIPE, text=True)
            for number in range(readers)
        ]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        writer, plan, sent = RingWriter(ring, sockets, lambda: None), decode_plan(rows), []
        for _ in range(plans):
            time.sleep(IDLE_SECONDS)
            sent.append(time.perf_counter())
            writer.write(codec.encode(Execute(plan)))
        writer.write(codec.encode(Stop()))
        received = [[float(one) for one in process.communicate()[0].split()] for process in processes]
    context.destroy(linger=0)
    return [[one - began for one in times] for began, *times in zip(sent, *received, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--plans", type=int, default=1000)
    for name in ("--fd", "--reader"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader is not None:
        read(args.fd, args.reader, args.readers, args.folder)
        return
    seconds = measure(args.readers, args.rows, args.plans)
    print(f"a plan of {args.rows} rows to {args.readers} idle workers, in us:")
    every = [one for of_plan in seconds for one in of_plan]
    for name, found in {"first": map(min, seconds), "any": every, "last": map(max, seconds)}.items():
        us = sorted(1e6 * one for one in found)
        print(f"  {name:5} worker has it: median {statistics.median(us):.0f}, p90 {us[len(us) * 9 // 10]:.0f}")


if __name__ == "__main__":
    main()
