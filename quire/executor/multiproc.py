"""Several workers, each in a process of its own, on this machine and on others."""

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.config import EngineConfig
from quire.executor.base import PendingOutput, WorkerMethod
from quire.executor.nodes import start_workers
from quire.executor.ranks import describe_layout, layout_of, no_transfer
from quire.executor.remote import RemoteExecutor
from quire.executor.stages import memory_of_all
from quire.executor.status_board import DONE, FAILED
from quire.executor.step_errors import WorkersLostError, diverged, out_of_step, rebuilt
from quire.executor.worker_calls import PickledCalls, TypedCalls, WorkerCalls
from quire.executor.worker_messages import (
    LOADED,
    Failed,
    FromWorker,
    Invoke,
    Joined,
    NodeLost,
    Returned,
    StepDone,
    StepError,
)
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import ModelRunnerOutput
from quire.messages.protocol import Codec
from quire.platforms import platform_class

POLL_MS = 50  # between looks at whether all workers live
STOP_SECONDS = 5.0  # for workers to end by themselves
AGREE_SECONDS = 3.0  # for the other ranks to end a step that one has failed in


class StepOutput:
    def __init__(self, wait: Callable[[int], ModelRunnerOutput], step: int) -> None:
        self._wait, self._step = wait, step

    def result(self) -> ModelRunnerOutput:
        return self._wait(self._step)


class MultiProcExecutor(RemoteExecutor):
    """Plans go to all workers, through a ring in shared memory on one machine; the rank that samples answers."""

    def __init__(self, config: EngineConfig) -> None:
        if config.transfer.connectors:
            raise ValueError(
                "kv_transfer_config and kv_offloading_size are not available yet with workers in processes of their "
                "own (--tensor-parallel-size, --pipeline-parallel-size, --distributed-executor-backend mp)"
            )
        super().__init__()
        parallel = config.parallel
        self._layout = layout_of(config)
        self._size = self._layout.size
        self._here = self._size // parallel.nnodes  # ranks of this machine, and of every other
        self._shared_memory = not platform_class(config.device.device).has_own_memory
        self._timeout = parallel.distributed_timeout_seconds
        self._numbers = itertools.count()
        self._read_step = 0  # the last whose output was returned
        self._joined: set[int] = set()
        self._returned: dict[int, dict[int, Returned]] = {LOADED: {}}
        self._outputs: dict[int, ModelRunnerOutput] = {}
        self._errors: dict[int, dict[int, StepError]] = {}  # by step and rank
        self._fatal: Exception | None = None
        self._lock = threading.RLock()
        self._decoder = Codec(FromWorker)
        self._calls: WorkerCalls = PickledCalls() if parallel.nnodes == 1 else TypedCalls()
        self._workers = start_workers(config)
        self._board = self._workers.board
        self._clean_up = weakref.finalize(self, self._workers.close)  # even without a call of shutdown()
        try:
            self._wait_loaded()
        except BaseException:
            self.shutdown()
            raise

    def _wait_loaded(self) -> None:
        if not self._receive(lambda: len(self._joined) == self._size, time.monotonic() + self._timeout):
            missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self._joined)
            raise RuntimeError(
                f"rank {missing} of {self._size} did not start within {self._timeout:g} s "
                "(--distributed-timeout-seconds)"
            )
        self._collect(LOADED)

    @property
    def pids(self) -> list[int]:
        """Of the worker processes of this machine, by rank."""
        return self._workers.pids

    def on_failure(self, notify: Callable[[Exception], None]) -> None:
        this = weakref.ref(self)

        def tell() -> None:
            executor = this()
            if executor is not None and (error := executor._cause()) is not None:
                notify(error)

        self._workers.on_failure(tell)

    def kv_cache_memory(self) -> int:
        """For the layers of all stages, so that each rank's part fits what it has. Ranks on a CPU share its memory."""
        share = self._here if self._shared_memory else 1
        return memory_of_all([size // share for size in self._call("kv_cache_memory")], self._call("kv_cache_specs"))

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        self._call("initialize_kv_cache", config, max_model_len, no_transfer)
        self._workers.connected()

    def _pending(self) -> PendingOutput:
        return StepOutput(self._result, self._step)

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A function must be one that workers can import, and all must be on this machine."""
        call = self._calls.write_call(method, args, kwargs)
        number = next(self._numbers)
        self._returned[number] = {}
        self._write(self._encoder.encode(Invoke(number, call)))
        return [self._calls.read_value(method, value) for value in self._collect(number)]

    def describe(self) -> str:
        nodes = self._size // self._here
        where = f" on {nodes} machines" if nodes > 1 else ""
        return f"{describe_layout(self._layout)}{where}, each {self._call('describe')[0]}"

    def shutdown(self) -> None:
        if not self._clean_up.alive:
            return
        with contextlib.suppress(Exception):
            self._workers.stop(STOP_SECONDS)
        self._clean_up()

    def _collect(self, number: int) -> list[bytes]:
        """What each rank returned; the error of the first that failed."""
        replies = self._returned[number]
        self._receive(lambda: len(replies) == self._size)
        del self._returned[number]
        for rank in range(self._size):
            if (error := replies[rank].error) is not None:
                raise self._calls.read_error(error)
        return [replies[rank].value for rank in range(self._size)]

    def _write(self, frames: Sequence[Any]) -> None:
        with self._lock:  # one thread at a time uses the sockets
            self._check()
            try:
                self._workers.write(frames)
            except WorkersLostError:
                self._check()  # which knows the cause
                raise

    def _receive(self, done: Callable[[], bool], until: float | None = None) -> bool:
        """Handle messages until `done`; False if that is not so at `until`. Raises once a worker has ended."""
        with self._lock:
            while not done():
                if self._handle_next(POLL_MS):
                    continue
                self._check()
                if until is not None and time.monotonic() > until:
                    return False
        return True

    def _handle_next(self, milliseconds: int) -> bool:
        """Handle a message, if there is one within that time."""
        frames = self._workers.receive(milliseconds)
        if frames is None:
            return False
        self._handle(self._decoder.decode(frames))
        return True

    def _handle(self, message: Any) -> None:
        match message:
            case StepDone(rank, step, output, error):
                if rank >= self._here:  # which cannot write to the board of this machine
                    self._board.set(rank, FAILED, step if error is not None else self._board.get(rank, FAILED))
                    self._board.set(rank, DONE, step)
                if error is not None and step <= self._read_step:
                    self._fatal = self._fatal or diverged(rank, error)
                elif error is not None:
                    self._errors.setdefault(step, {})[rank] = error
                elif output is not None:
                    self._outputs[step] = output
            case Returned(rank, number):
                self._returned[number][rank] = message
            case Joined(rank):
                self._joined.add(rank)
            case Failed(rank, error):
                # Workers meet before they are loaded, and load before they run: what ends one later is no user's error.
                cause = self._calls.read_error(error)
                loaded = LOADED not in self._returned
                if loaded or not isinstance(cause, ValueError):
                    cause = WorkersLostError(f"rank {rank} ended: {type(cause).__name__}: {cause}")
                self._fatal = self._fatal or cause
            case NodeLost(node, cause):
                self._fatal = self._fatal or WorkersLostError(f"node {node}: {cause}")

    def _check(self) -> None:
        """Raise if a worker has ended."""
        if self._fatal is not None or self._workers.failure is not None:
            error = self._cause()
            assert error is not None
            self._workers.fail(str(error))
            raise error

    def _cause(self) -> Exception | None:
        """Why no call can be served any more. What a worker said last counts, if it said anything."""
        with self._lock:
            while self._fatal is None and self._handle_next(POLL_MS):
                pass
            if self._fatal is None and self._workers.failure is not None:
                self._fatal = WorkersLostError(self._workers.failure)
        return self._fatal

    def _result(self, step: int) -> ModelRunnerOutput:
        self._receive(lambda: step in self._outputs or step in self._errors)
        self._wait_for_stages(step)
        if step in self._errors:
            raise self._step_error(step)
        self._read_step = step
        return self._outputs.pop(step)

    def _wait_for_stages(self, step: int) -> None:
        """The last stage may answer before an earlier one, whose step has failed, says so."""
        for rank in range((self._layout.stages - 1) * self._layout.tensor):
            while self._board.get(rank, DONE) < step:
                self._check()
                if rank < self._here:
                    time.sleep(0.0001)
                else:
                    self._receive(lambda rank=rank: self._board.get(rank, DONE) >= step)  # type: ignore[misc]
            if self._board.get(rank, FAILED) >= step:
                # In order: once a later error of the rank is here, there was none of this step.
                self._receive(lambda rank=rank: any(at >= step and rank in found for at, found in self._errors.items()))  # type: ignore[misc]

    def _step_error(self, step: int) -> Exception:
        """That of the step, if all ranks that share layers failed in it at one place: other stages go on. Otherwise
        they have diverged, and the engine ends: one that failed first may have gone on to the next plan, with
        collectives that the others took for theirs."""
        errors = self._errors[step]

        def ended(rank: int) -> bool:
            if rank in errors or self._board.get(rank, DONE) < step:
                return rank in errors
            # In order: if it failed in a later step, that error's message comes after one of this step.
            later = any(at > step and rank in found for at, found in self._errors.items())
            return later or self._board.get(rank, FAILED) < step

        progress: list[int] = []
        while not self._receive(lambda: all(map(ended, range(self._size))), time.monotonic() + AGREE_SECONDS):
            before, progress = progress, [self._board.get(rank, DONE) for rank in range(self._size)]
            if before == progress:
                break
        if (lost := out_of_step(errors, self._layout)) is not None:
            self._fatal = lost
            self._check()
        del self._errors[step]
        self._outputs.pop(step, None)
        return rebuilt(errors[min(errors)])
