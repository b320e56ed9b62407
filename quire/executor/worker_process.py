"""A worker in a process of its own: reads plans, runs them, answers. Started by worker_processes.py."""

import dataclasses
import logging
import os
import pickle
import queue
import select
import sys
import threading
from typing import Any

import zmq

from quire.config import environment
from quire.config.logs import set_up_logging
from quire.distributed.broadcast_ring import Ring, RingReader
from quire.executor.base import PendingOutput
from quire.executor.status_board import BEAT, DONE, FAILED, StatusBoard
from quire.executor.step_errors import launched, told
from quire.executor.worker_calls import PickledCalls, TypedCalls, WorkerCalls
from quire.executor.worker_messages import (
    LOADED,
    Execute,
    Failed,
    Invoke,
    Joined,
    Returned,
    Sample,
    StepDone,
    Stop,
    ToWorker,
    WritableCodec,
)
from quire.executor.worker_processes import WorkerStart
from quire.messages.protocol import Codec
from quire.platforms.process import die_with_parent, leave_signals_to_parent

logger = logging.getLogger("quire")

IDLE_SECONDS = 60.0  # between two looks at the ring, if nothing comes


class Answers:
    """The socket to the executor. Used by one thread at a time."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(f"ipc://{folder}/answers")
        self._codec = Codec()
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._socket.send_multipart(self._codec.encode(message), copy=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class WorkerProcess:
    def __init__(self, start: WorkerStart, answers: Answers, board: StatusBoard, ring: Ring) -> None:
        from quire.distributed.world import World
        from quire.executor.uniproc import UniProcExecutor
        from quire.worker.worker import Worker

        self._rank, self._answers, self._board = start.rank, answers, board
        self._calls, self._far = calls_of(start), start.far
        context = zmq.Context()
        overflow = context.socket(zmq.PULL)
        overflow.setsockopt(zmq.RCVHWM, 0)
        overflow.connect(f"ipc://{start.folder}/plans-{start.rank}")
        self._ring = RingReader(ring, start.reader, overflow)
        self._codec = WritableCodec(ToWorker)
        self._world = World.connect(
            start.rank,
            start.layout,
            start.address,
            start.backend,
            start.timeout,
            start.local_rank,
            start.share_memory,
        )
        answers.send(Joined(start.rank))
        load = start.config.load
        shown = load.use_tqdm_on_load and start.rank == 0  # one progress bar for all
        config = start.config.replace(load=dataclasses.replace(load, use_tqdm_on_load=shown))
        self._executor = UniProcExecutor(config, lambda config: Worker(config, self._world), in_place=True)
        # A device computes while further plans come: another thread waits for it.
        self._pending: queue.SimpleQueue[tuple[int, PendingOutput, int]] | None = None
        if self._executor.worker.platform.launches_async:
            self._pending = queue.SimpleQueue()
            threading.Thread(target=self._finish_all, name="quire-results", daemon=True).start()

    def run(self) -> None:
        while True:
            frames = self._ring.read(IDLE_SECONDS)
            if frames is None:
                continue
            match self._codec.decode(frames):
                case Execute(plan):
                    self._executor.execute_model(plan)
                case Sample(step, grammar):
                    pending = self._executor.sample_tokens(grammar)
                    place = 0 if launched(pending) else self._executor.worker.num_exchanges
                    if self._pending is None:
                        self._finish(step, pending, place)
                    else:
                        self._pending.put((step, pending, place))
                case Invoke(number, call):
                    self._invoke(number, call)
                case Stop():
                    self._world.close()
                    return

    def _finish_all(self) -> None:
        assert self._pending is not None
        while True:
            self._finish(*self._pending.get())

    def _finish(self, step: int, pending: PendingOutput, place: int) -> None:
        """`place`: where it failed, if it was not launched to its end."""
        try:
            output = pending.result()
            if self._world.answers or self._far:
                self._answers.send(StepDone(self._rank, step, output if self._world.answers else None))
        except BaseException as error:
            logger.log(logging.ERROR if self._world.answers else logging.DEBUG, "a step failed", exc_info=True)
            self._board.set(self._rank, FAILED, step)
            self._answers.send(StepDone(self._rank, step, error=told(error, place)))
        self._board.set(self._rank, DONE, step)

    def _invoke(self, number: int, call: bytes) -> None:
        try:
            method, args, kwargs = self._calls.read_call(call)
            (value,) = self._executor.collective_rpc(method, args, kwargs)
            answer = Returned(self._rank, number, self._calls.write_value(method, value))
        except BaseException as error:
            logger.debug("a call failed", exc_info=True)
            answer = Returned(self._rank, number, error=self._calls.write_error(error))
        self._answers.send(answer)


def calls_of(start: WorkerStart) -> WorkerCalls:
    return TypedCalls() if start.typed_calls else PickledCalls()


def _stay_alive(start: WorkerStart, board: StatusBoard, imported: threading.Event) -> None:
    """Heartbeats, until the executor's process is gone: its end of our standard input is closed with it. They begin
    once torch is imported, for seconds of which no other thread runs."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    count = 1
    while not poll.poll(start.beat_seconds * 1000):
        if imported.is_set():
            count += 1
            board.set(start.rank, BEAT, count)
    os._exit(1)


def _told() -> tuple[WorkerStart | None, Exception | None]:
    try:
        return pickle.load(sys.stdin.buffer), None
    except EOFError:
        os._exit(1)  # the executor's process is gone
    except Exception as error:
        return None, error


def main() -> None:
    start, error = _told()
    if start is None:
        sys.exit(
            f"quire: a worker process cannot read its options: {error}; classes and functions that they name must be "
            "in a module that can be imported"
        )
    die_with_parent(start.parent)
    leave_signals_to_parent()
    if start.cpus is not None:
        os.sched_setaffinity(0, start.cpus)
    quiet = start.rank > 0
    set_up_logging(
        max(start.log_level, logging.WARNING) if quiet else start.log_level,
        start.config.observability.log_config_file,
        name=f"rank {start.rank}",
    )
    board = StatusBoard(start.layout.size, start.status_fd)
    imported = threading.Event()
    threading.Thread(target=_stay_alive, args=(start, board, imported), name="quire-heartbeat", daemon=True).start()
    answers = Answers(start.folder)
    try:
        if start.interface:
            environment.GLOO_SOCKET_IFNAME.set_default(start.interface)
        import quire.worker.worker  # noqa: F401  (with torch)

        board.set(start.rank, BEAT, 1)  # from now on its silence is noticed
        imported.set()
        worker = WorkerProcess(start, answers, board, Ring(start.readers, fd=start.ring_fd))
        answers.send(Returned(start.rank, LOADED))
        worker.run()
        code = 0
    except BaseException as error:
        logger.debug("the worker ends", exc_info=True)
        answers.send(Failed(start.rank, calls_of(start).write_error(error)))
        code = 1
    answers.close()
    os._exit(code)


if __name__ == "__main__":
    main()
