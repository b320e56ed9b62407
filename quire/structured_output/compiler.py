"""Compiles grammars on background threads, each grammar once, with an LRU cache of the results.

A library in the middle of a compile cannot be stopped. A compile that exceeds its time limit is abandoned: its requests
fail, its thread runs until the library returns, and while all threads are occupied by such compiles new grammars are
refused at once. A queued grammar whose requests are all gone is not compiled.
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
from quire.structured_output.backends.base import CompiledGrammar, GrammarBusyError, GrammarError

logger = logging.getLogger("quire")

MAX_CACHED = 1024
# llguidance recurses once for each rule or reference of a chain, and a stack overflow would end the process. The
# longest allowed text needs less than this. Pages are only allocated when touched.
STACK_BYTES = 256 << 20

Key = tuple[object, ...]


class GrammarCache:
    """LRU cache of compiled grammars, limited in bytes and entries."""

    def __init__(self, max_bytes: int, max_count: int = MAX_CACHED) -> None:
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.num_bytes = 0
        self._entries: OrderedDict[Key, CompiledGrammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> CompiledGrammar | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, compiled: CompiledGrammar) -> None:
        if compiled.num_bytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = compiled
        self.num_bytes += compiled.num_bytes
        while self.num_bytes > self.max_bytes or len(self._entries) > self.max_count:
            self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes


@dataclass(slots=True, eq=False)
class CompileJob:
    key: Key
    spec: StructuredOutputsParams
    waiters: dict[str, float] = field(default_factory=dict)  # request id -> time at which it began to wait
    started: float | None = None
    compiled: CompiledGrammar | None = None
    error: RequestError | None = None


class GrammarCompiler:
    """The engine's thread submits requests and collects results; it never blocks."""

    def __init__(
        self,
        compile: Callable[[StructuredOutputsParams], CompiledGrammar],
        *,
        seconds: float,
        cache_bytes: int,
        num_threads: int = 2,
        max_queue: float = math.inf,
        queue_seconds: float = math.inf,
    ) -> None:
        self.cache = GrammarCache(cache_bytes)
        self.num_timed_out = 0  # compiles, since the start
        self._compile = compile
        self._seconds = seconds
        self._num_threads = num_threads
        self._max_queue = max_queue
        self._queue_seconds = queue_seconds
        self._threads: list[threading.Thread] = []
        self._queue: OrderedDict[Key, CompileJob] = OrderedDict()  # not started, in order; guarded by `_queue_changed`
        self._queue_changed = threading.Condition()
        self._finished: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
        self._any_finished = threading.Event()
        self._jobs: dict[Key, CompileJob] = {}
        self._job_of: dict[str, CompileJob] = {}  # by id of a waiting request
        self._stuck: list[CompileJob] = []  # timed out, but still running on their threads

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    @property
    def num_stuck(self) -> int:
        """Threads occupied by compiles that timed out."""
        return len(self._stuck)

    def request(self, key: Key, spec: StructuredOutputsParams, request_id: str) -> CompiledGrammar | None:
        """The grammar if it is cached; else the request waits for it. GrammarBusyError if the queue is full."""
        found = self.cache.get(key)
        if found is not None:
            return found
        job = self._jobs.get(key)
        if job is None:
            self._forget_finished_stuck()
            if len(self._stuck) >= self._num_threads:
                raise GrammarBusyError(
                    "all compiler threads are busy with grammars that take too long; try again later"
                )
            job = CompileJob(key, spec)
            with self._queue_changed:
                if len(self._queue) >= self._max_queue:
                    limit = f"--structured-outputs-max-queue {self._max_queue}"
                    raise GrammarBusyError(f"{len(self._queue)} grammars are already queued for a compiler ({limit})")
                self._jobs[key] = self._queue[key] = job
                self._queue_changed.notify()
            if len(self._threads) < self._num_threads:
                self._start_thread()
        job.waiters[request_id] = time.monotonic()
        self._job_of[request_id] = job
        return None

    def cancel(self, request_id: str) -> None:
        """The request was aborted. The result of a compile that has started is still cached."""
        job = self._job_of.pop(request_id, None)
        if job is not None:
            del job.waiters[request_id]
            if not job.waiters:
                self._withdraw(job)

    def _withdraw(self, job: CompileJob) -> None:
        with self._queue_changed:
            if self._queue.get(job.key) is job:
                del self._queue[job.key], self._jobs[job.key]

    def collect(self) -> list[CompileJob]:
        """Jobs that have finished or timed out (with an error) since the last call."""
        self._any_finished.clear()
        ended = []
        while not self._finished.empty():
            job = self._finished.get()
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
                self.num_timed_out += 1
                ended.append(CompileJob(job.key, job.spec, job.waiters, error=invalid(self._time_limit_message())))
        ended += self._queue_timeouts(now)
        for job in ended:
            for request_id in job.waiters:
                self._job_of.pop(request_id, None)
        return ended

    def _queue_timeouts(self, now: float) -> list[CompileJob]:
        """Jobs in the queue with their timed-out requests; all requests while every compiler thread is stuck."""
        with self._queue_changed:
            queued = list(self._queue.values())
        ended = []
        all_stuck = len(self._stuck) >= self._num_threads
        limit = f"{self._queue_seconds:g} seconds (--structured-outputs-queue-seconds)"
        cause = "all compiler threads are busy" if all_stuck else f"no compiler was free within {limit}"
        for job in queued:
            late = {i: since for i, since in job.waiters.items() if all_stuck or now - since > self._queue_seconds}
            if late:
                busy = RequestError(ErrorKind.BUSY, f"{cause}; try again later")
                ended.append(CompileJob(job.key, job.spec, late, error=busy))
                job.waiters = {i: since for i, since in job.waiters.items() if i not in late}
                if not job.waiters:
                    self._withdraw(job)
        return ended

    def wait(self, seconds: float) -> None:
        """Block until a compile finishes, for at most `seconds`."""
        self._any_finished.wait(seconds)

    def _time_limit_message(self) -> str:
        return f"compiling took more than {self._seconds:g} seconds (--structured-outputs-compile-seconds)"

    def _forget_finished_stuck(self) -> None:
        self._stuck = [job for job in self._stuck if job.compiled is None and job.error is None]

    def _start_thread(self) -> None:
        # Daemons: a compile that never returns must not keep the process alive.
        thread = threading.Thread(target=self._run, name="quire-grammar", daemon=True)
        self._threads.append(thread)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            with self._queue_changed:
                while not self._queue:
                    self._queue_changed.wait()
                job = self._queue.popitem(last=False)[1]
                job.started = time.monotonic()
            try:
                job.compiled = self._compile(job.spec)
            except GrammarError as error:
                job.error = invalid(str(error))
            except BaseException as error:  # also a panic of a Rust library
                logger.error("a grammar library failed to compile a %s", job.spec.kind, exc_info=error)
                job.error = library_failure(error)
            self._finished.put(job)
            self._any_finished.set()


def library_failure(error: BaseException) -> RequestError:
    failure = failure_of(error)
    return RequestError(failure.kind, f"the grammar library failed: {failure.message}")
