"""Runs the client in this process, or in several that share the requests."""

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.bench.serve_client import Client, Request, Run, Target

LEAD = 0.2  # seconds from all clients being ready to the start
START_UP_SECONDS = 60


@dataclass(frozen=True)
class Plan:
    target: Target
    path: str
    max_concurrency: int | None
    requests: list[Request]
    keep_text: bool = False
    streams: bool = True


def drive(plan: Plan, processes: int) -> Run:
    if processes == 1:
        return _in_order(_run(plan, time.perf_counter))
    return _drive_many([part for part in split(plan, processes) if part.requests])


def split(plan: Plan, processes: int) -> list[Plan]:
    """Distributes requests and concurrency round-robin."""
    if plan.max_concurrency is not None and plan.max_concurrency < processes:
        raise ValueError(
            f"{processes} client processes cannot share a concurrency of {plan.max_concurrency}; raise "
            "--max-concurrency or lower --client-processes"
        )
    return [
        replace(
            plan,
            max_concurrency=None if plan.max_concurrency is None else len(range(i, plan.max_concurrency, processes)),
            requests=plan.requests[i::processes],
        )
        for i in range(processes)
    ]


def _drive_many(plans: list[Plan]) -> Run:
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    try:
        for plan in plans:
            near, far = context.Pipe()
            child = context.Process(target=_child, args=(far, plan), daemon=True)
            child.start()
            far.close()
            pipes.append(near)
            children.append(child)
        for pipe in pipes:
            if not pipe.poll(START_UP_SECONDS):
                raise TimeoutError(f"a client process did not start within {START_UP_SECONDS} s")
            pipe.recv()
        start = time.perf_counter() + LEAD
        for pipe in pipes:
            pipe.send(start)
        records = [record for pipe in pipes for record in pipe.recv().records]
    except EOFError:
        raise ValueError("a client process exited early; its error is above") from None
    finally:
        for child in children:
            child.terminate()
            child.join(10)
    return _in_order(Run(start, records))


def _child(pipe: multiprocessing.connection.Connection, plan: Plan) -> None:
    def when() -> float:
        pipe.send("ready")
        return pipe.recv()

    pipe.send(_run(plan, when))


def _run(plan: Plan, when: Callable[[], float]) -> Run:
    import uvloop

    async def run() -> Run:
        client = Client(plan.target, plan.path, plan.max_concurrency, plan.keep_text, plan.streams)
        return await client.run(plan.requests, when)

    return uvloop.run(run())


def _in_order(run: Run) -> Run:
    return Run(run.start, sorted(run.records, key=lambda record: record.index))
