"""Threads for a store's calls, the most urgent first."""

import enum
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("quire")

CLOSE_SECONDS = 10.0  # for what has begun; a file system that hangs is left to its threads, which end with the process


class Closable(Protocol):
    def close(self) -> None: ...


class Urgency(enum.IntEnum):
    LOOKUP = 0  # a request cannot be placed before
    READ = 1  # a request waits
    WRITE = 2  # nobody waits


class IOPool:
    """One thread is kept from writes, so that a lookup never waits for a slow one."""

    def __init__(self, num_threads: int, name: str = "quire-kv-io") -> None:
        self._jobs: list[tuple[Urgency, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(num_threads > 1 and i == 0,), name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, job: Callable[[], None]) -> None:
        """After `close` jobs are dropped."""
        with self._free:
            if not self._closed:
                heapq.heappush(self._jobs, (urgency, next(self._order), job))
                self._free.notify_all() if urgency == Urgency.WRITE else self._free.notify()

    def close(self) -> None:
        """Jobs that have begun are finished, and writes that were submitted."""
        with self._free:
            self._closed = True
            self._jobs = [job for job in self._jobs if job[0] == Urgency.WRITE]
            heapq.heapify(self._jobs)
            self._free.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, never_writes: bool) -> None:
        while (job := self._next(never_writes)) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of the KV cache's store failed")

    def _next(self, never_writes: bool) -> Callable[[], None] | None:
        with self._free:
            while True:
                if self._jobs and not (never_writes and self._jobs[0][0] == Urgency.WRITE):
                    return heapq.heappop(self._jobs)[2]
                if self._closed:
                    return None
                self._free.wait()


def close_all(*opened: Closable) -> None:
    """For a finalizer: in this order, and without their owner."""
    for one in opened:
        one.close()
