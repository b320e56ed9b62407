"""Starts worker processes and watches them: they end together, and with the process that started them."""

import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from quire.config import EngineConfig
from quire.config.environment import process_environment
from quire.distributed.layout import WorldLayout
from quire.executor.status_board import BEAT, StatusBoard

logger = logging.getLogger("quire")

BEATS_PER_LIMIT = 4  # heartbeats in the time after which a worker counts as stopped
LONGEST_BEAT = 1.0  # seconds between heartbeats


@dataclass
class WorkerStart:
    """What a worker process is told before anything else."""

    config: EngineConfig
    rank: int
    layout: WorldLayout
    local_rank: int
    folder: str  # of sockets
    address: str  # where ranks meet
    backend: str  # of their collectives
    timeout: float  # seconds to meet in, and to wait in a collective
    share_memory: bool  # with ranks that share layers
    interface: str  # of gloo's collectives; "": as it finds it
    typed_calls: bool  # of methods, from an executor that may be on another machine
    far: bool  # it is: every step is answered
    reader: int  # its number among the workers of this machine, which read the ring
    readers: int
    ring_fd: int
    status_fd: int
    parent: int
    log_level: int
    beat_seconds: float
    cpus: tuple[int, ...] | None = None  # that it runs on; None: any


class WorkerProcesses:
    """A thread starts them and then watches them: the kernel ends a child with the thread that started it, and a
    program may make an engine in a thread that soon ends."""

    def __init__(self, starts: Sequence[WorkerStart], board: StatusBoard, heartbeat_timeout: float) -> None:
        self.failure: str | None = None  # which worker ended, and how
        self.on_failure: Callable[[], None] | None = None  # called, in a thread of its own, once there is one
        self._starts, self._board, self._limit = starts, board, heartbeat_timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stop_seconds: float | None = None  # to end by themselves in, once stop is called
        self._wake_fd = os.eventfd(0)
        self._running = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-workers", daemon=True)
        self._thread.start()
        self._running.wait()
        if self._error is not None:
            raise self._error

    def fail(self, cause: str) -> None:
        """End all workers because of `cause`."""
        self.failure = self.failure or cause
        self._wake()

    def stop(self, seconds: float) -> None:
        """Wait so long for the workers to end, then kill them; none is left when this returns."""
        self._stop_seconds = seconds
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._processes]

    def _wake(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)

    def __del__(self) -> None:
        os.close(self._wake_fd)

    def _run(self) -> None:
        try:
            for start in self._starts:
                self._processes.append(_start(start))
        except BaseException as error:
            self._error = error
            self._kill()
            return
        finally:
            self._running.set()
        self._watch()
        if self._stop_seconds is not None:
            until = time.monotonic() + self._stop_seconds
            while time.monotonic() < until and any(process.poll() is None for process in self._processes):
                time.sleep(0.005)
        self._kill()
        if self.failure is not None and self.on_failure is not None:
            self.on_failure()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        pidfds = [os.pidfd_open(process.pid) for process in self._processes]
        for fd in pidfds:
            poll.register(fd, select.POLLIN)
        tick = beat_seconds(self._limit)
        beats = [(0, 0)] * len(self._starts)  # of each: the last heartbeat, and ticks since
        due = time.monotonic() + tick
        while self.failure is None and self._stop_seconds is None:
            poll.poll(max(0.0, due - time.monotonic()) * 1000)
            ended = [place for place, process in enumerate(self._processes) if process.poll() is not None]
            if ended and self._stop_seconds is None:
                # One that was killed is the cause, others may have ended because it is gone.
                first = min(ended, key=lambda place: self._processes[place].returncode)
                self.failure = self.failure or self._name(first) + how_it_ended(self._processes[first].returncode)
            if time.monotonic() >= due:
                # Ticks, not time: where this process was stopped too, all count on together.
                due = time.monotonic() + tick
                for place, (last, ticks) in enumerate(beats):
                    now = self._board.get(self._starts[place].rank, BEAT)
                    beats[place] = (now, ticks + 1 if now == last and now > 0 else 0)
                    if self._limit and beats[place][1] * tick > self._limit:
                        silent = f"has not responded for {self._limit:g} s (--engine-heartbeat-timeout)"
                        self.failure = self.failure or self._name(place) + silent
        for fd in pidfds:
            os.close(fd)

    def _name(self, place: int) -> str:
        return f"the worker process of rank {self._starts[place].rank} (pid {self._processes[place].pid}) "

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            _input(process).close()


def beat_seconds(limit: float) -> float:
    """Between two heartbeats."""
    return min(LONGEST_BEAT, limit / BEATS_PER_LIMIT) if limit else LONGEST_BEAT


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    named = -code in {each.value for each in signal.Signals}
    name = signal.Signals(-code).name if named else f"signal {-code}"
    return f"was killed by {name}" + (": by a user, or for want of memory" if name == "SIGKILL" else "")


def _start(start: WorkerStart) -> "subprocess.Popen[bytes]":
    """A fresh interpreter: a fork would inherit locks held by this process's threads, and a spawn of multiprocessing
    would run the user's script again."""
    try:
        told = pickle.dumps(start)
    except Exception as error:
        raise ValueError(
            f"worker processes cannot be sent these options: {error}; classes and functions that they name must be in "
            "a module that can be imported"
        ) from error
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.executor.worker_process"],
        stdin=subprocess.PIPE,
        pass_fds=(start.ring_fd, start.status_fd),
        env=process_environment({"PYTHONPATH": path}),
    )
    try:
        _input(process).write(told)
        _input(process).flush()
    except BrokenPipeError:
        pass  # it has ended, which is noticed
    return process


def _input(process: "subprocess.Popen[bytes]") -> IO[Any]:
    """Open as long as this process lives: its end is another sign for the worker to end."""
    assert process.stdin is not None
    return process.stdin
