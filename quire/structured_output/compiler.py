"""Grammars compiled on threads of their own, each only once, and kept while there is room.

A library in the middle of a compile cannot be stopped. One that takes too long is given up: its requests end, its
thread goes on until it is done, and while all threads are taken up so, new grammars are refused at once. A grammar that
nobody waits for any more before its compile has begun is not compiled.
"""

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.messages.requests import ErrorKind, RequestError, failure_of, invalid
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import Compiled, GrammarBusyError, GrammarError

logger = logging.getLogger("quire")

MAX_CACHED = 1024
# llguidance recurses once for each rule or reference of a chain, and an overflow would end the process. The longest
# text that is allowed needs less than this. Memory is taken as it is used.
STACK_BYTES = 256 << 20

Key = tuple[object, ...]


class GrammarCache:
    """The grammars used last, within a number of bytes."""

    def __init__(self, max_bytes: int, max_count: int = MAX_CACHED) -> None:
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.num_bytes = 0
        self._kept: OrderedDict[Key, Compiled] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Compiled | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Key, compiled: Compiled) -> None:
        if compiled.num_bytes > self.max_bytes or key in self._kept:
            return
        self._kept[key] = compiled
        self.num_bytes += compiled.num_bytes
        while self.num_bytes > self.max_bytes or len(self._kept) > self.max_count:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes


@dataclass(slots=True, eq=False)
class Job:
    key: Key
    spec: StructuredOutputsParams
    waiters: dict[str, float] = field(default_factory=dict)  # request id -> since when
    started: float | None = None
    compiled: Compiled | None = None
    error: RequestError | None = None


class GrammarCompiler:
    """The engine's thread asks and collects; it never waits."""

    def __init__(
        self,
        compile: Callable[[StructuredOutputsParams], Compiled],
        *,
        seconds: float,
        cache_bytes: int,
        num_threads: int = 2,
        max_queue: float = math.inf,
        queue_seconds: float = math.inf,
    ) -> None:
        self.cache = GrammarCache(cache_bytes)
        self.num_given_up = 0  # compiles that took too long, in all
        self._compile = compile
        self._seconds = seconds
        self._num_threads = num_threads
        self._max_queue = max_queue
        self._queue_seconds = queue_seconds
        self._threads: list[threading.Thread] = []
        self._todo: OrderedDict[Key, Job] = OrderedDict()  # not begun, in order; under the lock of `_more`
        self._more = threading.Condition()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._news = threading.Event()
        self._jobs: dict[Key, Job] = {}
        self._awaited: dict[str, Job] = {}  # by the request that waits
        self._stuck: list[Job] = []  # given up, while their threads are still at it

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    @property
    def num_stuck(self) -> int:
        """Threads that are taken up by compiles that nobody waits for."""
        return len(self._stuck)

    def request(self, key: Key, spec: StructuredOutputsParams, request_id: str) -> Compiled | None:
        """The grammar if it is there; else the request waits for it. GrammarBusyError if too many do."""
        found = self.cache.get(key)
        if found is not None:
            return found
        job = self._jobs.get(key)
        if job is None:
            self._collect_stuck()
            if len(self._stuck) >= self._num_threads:
                raise GrammarBusyError("all compilers are taken up by grammars that take too long; try again later")
            job = Job(key, spec)
            with self._more:
                if len(self._todo) >= self._max_queue:
                    limit = f"--structured-outputs-max-queue {self._max_queue}"
                    raise GrammarBusyError(f"{len(self._todo)} grammars wait for a compiler already ({limit})")
                self._jobs[key] = self._todo[key] = job
                self._more.notify()
            if len(self._threads) < self._num_threads:
                self._start_thread()
        job.waiters[request_id] = time.monotonic()
        self._awaited[request_id] = job
        return None

    def forget(self, request_id: str) -> None:
        """The request is gone. A compile that has begun still ends in the cache."""
        job = self._awaited.pop(request_id, None)
        if job is not None:
            del job.waiters[request_id]
            if not job.waiters:
                self._withdraw(job)

    def _withdraw(self, job: Job) -> None:
        with self._more:
            if self._todo.get(job.key) is job:
                del self._todo[job.key], self._jobs[job.key]

    def collect(self) -> list[Job]:
        """Jobs that have ended since the last call, those that took too long with an error."""
        self._news.clear()
        ended = []
        while not self._done.empty():
            job = self._done.get()
            if job in self._stuck:
                self._stuck.remove(job)
            if job.compiled is not None:
                self.cache.put(job.key, job.compiled)
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
                ended.append(job)
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.started is not None and now - job.started > self._seconds:
                del self._jobs[job.key]
                self._stuck.append(job)
                self.num_given_up += 1
                ended.append(Job(job.key, job.spec, job.waiters, error=invalid(self._too_slow())))
        ended += self._waited_too_long(now)
        for job in ended:
            for request_id in job.waiters:
                self._awaited.pop(request_id, None)
        return ended

    def _waited_too_long(self, now: float) -> list[Job]:
        """Those whose compile has not begun: some of their requests, or all if no compiler will be free soon."""
        with self._more:
            queued = list(self._todo.values())
        ended = []
        all_stuck = len(self._stuck) >= self._num_threads
        limit = f"{self._queue_seconds:g} seconds (--structured-outputs-queue-seconds)"
        cause = "all compilers are busy" if all_stuck else f"no compiler was free within {limit}"
        for job in queued:
            late = {i: since for i, since in job.waiters.items() if all_stuck or now - since > self._queue_seconds}
            if late:
                busy = RequestError(ErrorKind.BUSY, f"{cause}; try again later")
                ended.append(Job(job.key, job.spec, late, error=busy))
                job.waiters = {i: since for i, since in job.waiters.items() if i not in late}
                if not job.waiters:
                    self._withdraw(job)
        return ended

    def wait(self, seconds: float) -> None:
        """Until a compile ends, at most so long."""
        self._news.wait(seconds)

    def _too_slow(self) -> str:
        return f"compiling took more than {self._seconds:g} seconds (--structured-outputs-compile-seconds)"

    def _collect_stuck(self) -> None:
        self._stuck = [job for job in self._stuck if job.compiled is None and job.error is None]

    def _start_thread(self) -> None:
        # Daemons: a compile that takes for ever must not keep the process alive.
        thread = threading.Thread(target=self._run, name="quire-grammar", daemon=True)
        self._threads.append(thread)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            with self._more:
                while not self._todo:
                    self._more.wait()
                job = self._todo.popitem(last=False)[1]
                job.started = time.monotonic()
            try:
                job.compiled = self._compile(job.spec)
            except GrammarError as error:
                job.error = invalid(str(error))
            except BaseException as error:  # also a panic of a Rust library
                logger.error("a grammar library failed to compile a %s", job.spec.kind, exc_info=error)
                job.error = library_failure(error)
            self._done.put(job)
            self._news.set()


def library_failure(error: BaseException) -> RequestError:
    failure = failure_of(error)
    return RequestError(failure.kind, f"the grammar library failed: {failure.message}")
