"""Ranks as real processes, for tests."""

import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from quire.distributed.layout import WorldLayout
from quire.distributed.world import World

FORKED = multiprocessing.get_context("forkserver")  # of a process that has imported torch and computed nothing
FORKED.set_forkserver_preload([__name__])
LIMIT = 120.0  # for all processes together
WAIT = 20.0  # of ranks for each other

Task = Callable[..., Any]


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def on_ranks(size: int, task: Task, *arguments: Any, who: list[int] | None = None) -> dict[int, Any]:
    """What task(rank, *arguments) returned on each, or the text of its error; None for a process that died."""
    processes, pipes = {}, {}
    for rank in range(size) if who is None else who:
        ours, theirs = FORKED.Pipe()
        processes[rank] = FORKED.Process(target=_run, args=(theirs, task, rank, *arguments), daemon=True)
        processes[rank].start()
        theirs.close()
        pipes[rank] = ours
    found: dict[int, Any] = {}
    try:
        for rank, pipe in pipes.items():
            assert wait([pipe], LIMIT), f"rank {rank} hangs"
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                found[rank] = None
        for process in processes.values():
            process.join(LIMIT)
            assert not process.is_alive()
        return found
    finally:
        for process in processes.values():
            process.kill()


def _run(pipe: Connection, task: Task, rank: int, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        result = task(rank, *arguments)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    pipe.send_bytes(pickle.dumps(result))  # send() would share tensors' memory, which ends with this process


def in_world(rank: int, task: Task, layout: WorldLayout, address: str, *arguments: Any, **options: Any) -> Any:
    """task(world, *arguments) on a rank of a connected world."""
    world = World.connect(rank, layout, address, "gloo", WAIT, **options)
    try:
        return task(world, *arguments)
    finally:
        world.close()


def over_gloo(rank: int, task: Task, layout: WorldLayout, address: str, *arguments: Any) -> Any:
    return in_world(rank, task, layout, address, *arguments, share_memory=False)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
