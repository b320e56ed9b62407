"""The workers of this machine: their processes, the ring by which plans reach them, and the socket of their answers."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from quire.config import EngineConfig
from quire.distributed.broadcast_ring import Ring, RingWriter
from quire.distributed.layout import WorldLayout
from quire.distributed.socket_folder import SocketFolder
from quire.executor.placement import Places
from quire.executor.status_board import StatusBoard
from quire.executor.step_errors import WorkersLostError
from quire.executor.worker_messages import Stop
from quire.executor.worker_processes import WorkerProcesses, WorkerStart, beat_seconds
from quire.messages.protocol import Codec

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class Machine:
    """Which ranks are here, and how they reach those of other machines."""

    layout: WorldLayout
    ranks: range
    address: str | None = None  # where all ranks meet; None: all are here
    interface: str = "lo"  # of gloo's collectives; "": as it finds it

    @property
    def alone(self) -> bool:
        return len(self.ranks) == self.layout.size


class LocalWorkers:
    def __init__(self, config: EngineConfig, machine: Machine) -> None:
        """Started, but not yet loaded. ValueError if there are fewer devices than ranks."""
        places = Places(config, len(machine.ranks))
        ring, self.board = Ring(len(machine.ranks)), StatusBoard(machine.layout.size)
        self._fds = (ring.fd, self.board.fd)
        self._folder, self._context = SocketFolder(), zmq.Context()
        try:
            self._processes = self._start(config, machine, places, ring)
        except BaseException:
            self._release()
            raise

    def _start(self, config: EngineConfig, machine: Machine, places: Places, ring: Ring) -> WorkerProcesses:
        address = f"ipc://{self._folder.path}"
        self.inbox = _bind(self._context, zmq.PULL, f"{address}/answers")
        overflow = [_bind(self._context, zmq.PUSH, f"{address}/plans-{rank}") for rank in machine.ranks]
        self._ring = RingWriter(ring, overflow, self._check)
        limit = config.observability.engine_heartbeat_timeout
        start = WorkerStart(
            config=config,
            rank=0,
            layout=machine.layout,
            local_rank=0,
            folder=str(self._folder.path),
            address=machine.address or f"file://{self._folder.path}/ranks",
            backend=places.backend,
            timeout=config.parallel.distributed_timeout_seconds,
            # A group of ranks that share layers is on one machine, or none of them is.
            share_memory=machine.alone or len(machine.ranks) % machine.layout.tensor == 0,
            interface=machine.interface,
            typed_calls=not machine.alone,
            far=machine.ranks.start > 0,
            reader=0,
            readers=len(machine.ranks),
            ring_fd=ring.fd,
            status_fd=self.board.fd,
            parent=os.getpid(),
            log_level=logger.getEffectiveLevel(),
            beat_seconds=beat_seconds(limit),
        )
        starts = [
            places.place(dataclasses.replace(start, rank=rank, reader=reader))
            for reader, rank in enumerate(machine.ranks)
        ]
        return WorkerProcesses(starts, self.board, limit)

    @property
    def pids(self) -> list[int]:
        """Of the worker processes, by rank."""
        return self._processes.pids

    @property
    def failure(self) -> str | None:
        """Which worker ended, and how."""
        return self._processes.failure

    def on_failure(self, notify: Callable[[], None]) -> None:
        """`notify` is called, in a thread of its own, once there is one."""
        self._processes.on_failure = notify
        if self.failure is not None:
            notify()

    def fail(self, cause: str) -> None:
        """End all workers because of `cause`."""
        self._processes.fail(cause)

    def write(self, frames: Sequence[Any]) -> None:
        """To all workers."""
        self._ring.write(frames)

    def receive(self, milliseconds: int) -> Sequence[Any] | None:
        """The frames of the next answer, if one comes within that time."""
        return self.inbox.recv_multipart() if self.inbox.poll(milliseconds) else None

    def connected(self) -> None:
        """All workers have met, and need no names any more."""
        self._folder.remove()

    def stop(self, seconds: float) -> None:
        """Tell the workers to end, and wait so long for them."""
        if self.failure is None:
            with contextlib.suppress(WorkersLostError):
                self.write(Codec().encode(Stop()))
        self._processes.stop(seconds)

    def close(self) -> None:
        """No worker is left when this returns."""
        self._processes.stop(0)
        self._release()

    def _release(self) -> None:
        self._folder.remove()
        self._context.destroy(linger=0)
        for fd in self._fds:
            os.close(fd)

    def _check(self) -> None:
        if self.failure is not None:
            raise WorkersLostError(self.failure)


def _bind(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket
