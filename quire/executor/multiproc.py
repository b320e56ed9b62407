"""Several workers, each in a process of its own on this machine."""

import contextlib
import dataclasses
import itertools
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq

from quire.config import EngineConfig
from quire.distributed.broadcast_ring import Ring, RingWriter
from quire.distributed.layout import WorldLayout
from quire.distributed.socket_folder import SocketFolder
from quire.executor.base import PendingOutput, WorkerMethod
from quire.executor.placement import Places
from quire.executor.stages import memory_of_all, specs_of_all
from quire.executor.status_board import DONE, FAILED, StatusBoard
from quire.executor.step_errors import WorkersLostError, diverged, rebuilt
from quire.executor.worker_messages import (
    LOADED,
    Execute,
    Failed,
    FromWorker,
    Invoke,
    Joined,
    Returned,
    Sample,
    StepDone,
    StepError,
    Stop,
)
from quire.executor.worker_processes import WorkerProcesses, WorkerStart, beat_seconds
from quire.messages.features import FeatureSupport
from quire.messages.kv_cache import KVCacheConfig, KVCacheSpec
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.protocol import Codec
from quire.platforms import platform_class

if TYPE_CHECKING:
    from quire.lora.adapters import AdapterWeights

logger = logging.getLogger("quire")

POLL_MS = 50  # between looks at whether all workers live
STOP_SECONDS = 5.0  # for workers to end by themselves
AGREE_SECONDS = 3.0  # for the other ranks to end a step that one has failed in


class StepOutput:
    def __init__(self, wait: Callable[[int], ModelRunnerOutput], step: int) -> None:
        self._wait, self._step = wait, step

    def result(self) -> ModelRunnerOutput:
        return self._wait(self._step)


class MultiProcExecutor:
    """Plans go to all workers through a ring in shared memory; the rank that samples answers."""

    def __init__(self, config: EngineConfig) -> None:
        if config.transfer.connectors:
            raise ValueError(
                "kv_transfer_config is not available yet with workers in processes of their own "
                "(--tensor-parallel-size, --pipeline-parallel-size, --distributed-executor-backend mp)"
            )
        parallel = config.parallel
        self._layout = WorldLayout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._size = self._layout.size
        self._shared_memory = not platform_class(config.device.device).has_own_memory
        self._timeout = parallel.distributed_timeout_seconds
        self._numbers = itertools.count()
        self._step = self._read_step = 0  # the last that was sampled, and the last whose output was returned
        self._joined: set[int] = set()
        self._returned: dict[int, dict[int, Returned]] = {LOADED: {}}
        self._outputs: dict[int, ModelRunnerOutput] = {}
        self._errors: dict[int, dict[int, StepError]] = {}  # by step and rank
        self._fatal: Exception | None = None
        self._unsent: Exception | None = None  # why the last plan could not be encoded
        self._lock = threading.RLock()
        self._encoder, self._decoder = Codec(), Codec(FromWorker)
        self._places = Places(config, self._size)
        ring, self._board = Ring(self._size), StatusBoard(self._size)
        self._folder, context = SocketFolder(), zmq.Context()
        address = f"ipc://{self._folder.path}"
        self._inbox = _bind(context, zmq.PULL, f"{address}/answers")
        overflow = [_bind(context, zmq.PUSH, f"{address}/plans-{rank}") for rank in range(self._size)]
        self._ring = RingWriter(ring, overflow, self._check)
        limit = config.observability.engine_heartbeat_timeout
        start = WorkerStart(
            config=config,
            rank=0,
            layout=self._layout,
            local_rank=0,
            folder=str(self._folder.path),
            address=f"file://{self._folder.path}/ranks",
            backend=self._places.backend,
            timeout=self._timeout,
            ring_fd=ring.fd,
            status_fd=self._board.fd,
            parent=os.getpid(),
            log_level=logger.getEffectiveLevel(),
            beat_seconds=beat_seconds(limit),
        )
        starts = [self._places.place(dataclasses.replace(start, rank=rank)) for rank in range(self._size)]
        self._processes = WorkerProcesses(starts, self._board, limit)
        # Even without a call of shutdown().
        self._clean_up = weakref.finalize(self, _clean_up, self._processes, self._folder, context, ring, self._board)
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
        """Of the worker processes, by rank."""
        return self._processes.pids

    def on_failure(self, notify: Callable[[Exception], None]) -> None:
        this = weakref.ref(self)

        def tell() -> None:
            executor = this()
            if executor is not None and (error := executor._cause()) is not None:
                notify(error)

        self._processes.on_failure = tell
        if self._processes.failure is not None:
            tell()

    def kv_cache_specs(self) -> dict[int, KVCacheSpec]:
        return specs_of_all(self._call("kv_cache_specs"))

    def kv_cache_memory(self) -> int:
        """For the layers of all stages, so that each rank's part fits what it has. Ranks on a CPU share its memory."""
        share = self._size if self._shared_memory else 1
        return memory_of_all([size // share for size in self._call("kv_cache_memory")], self._call("kv_cache_specs"))

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        self._call("initialize_kv_cache", config, max_model_len, _nothing)
        self._folder.remove()  # all have connected, to us and to one another

    def execute_model(self, plan: SchedulerOutput) -> None:
        try:
            frames = self._encoder.encode(Execute(plan))
        except (TypeError, ValueError, OverflowError) as error:
            self._unsent = error
        else:
            self._write(frames)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> PendingOutput:
        error, self._unsent = self._unsent, None
        if error is not None:
            unsent: Future[ModelRunnerOutput] = Future()
            unsent.set_exception(error)
            return unsent
        self._step += 1
        self._write(self._encoder.encode(Sample(self._step, grammar)))
        return StepOutput(self._result, self._step)

    def set_adapter(self, lora_id: int, weights: "AdapterWeights") -> None:
        self._call("set_adapter", lora_id, weights)

    def remove_adapter(self, lora_id: int) -> None:
        self._call("remove_adapter", lora_id)

    def feature_support(self) -> FeatureSupport | None:
        support: FeatureSupport | None = self._call("feature_support")[0]
        return support

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A function must be one that workers can import."""
        call = pickle.dumps((method, tuple(args), dict(kwargs)))
        number = next(self._numbers)
        self._returned[number] = {}
        self._write(self._encoder.encode(Invoke(number, call)))
        return self._collect(number)

    def describe(self) -> str:
        kinds = {"tensor": self._layout.tensor, "pipeline": self._layout.stages}
        shape = " x ".join(f"{kind} parallel {size}" for kind, size in kinds.items() if size > 1)
        ranks = f"{self._size} ranks ({shape})" if shape else "1 rank"
        return f"{ranks}, each {self._call('describe')[0]}"

    def shutdown(self) -> None:
        if not self._clean_up.alive:
            return
        with contextlib.suppress(Exception):
            self._write(self._encoder.encode(Stop()))
            self._processes.stop(STOP_SECONDS)
        self._clean_up()

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.collective_rpc(method, args, {})

    def _collect(self, number: int) -> list[Any]:
        """What each rank returned; the error of the first that failed."""
        replies = self._returned[number]
        self._receive(lambda: len(replies) == self._size)
        del self._returned[number]
        for rank in range(self._size):
            if (error := replies[rank].error) is not None:
                raise pickle.loads(error)
        return [pickle.loads(replies[rank].value) for rank in range(self._size)]

    def _write(self, frames: Sequence[Any]) -> None:
        self._check()
        self._ring.write(frames)

    def _receive(self, done: Callable[[], bool], until: float | None = None) -> bool:
        """Handle messages until `done`; False if that is not so at `until`. Raises once a worker has ended."""
        with self._lock:
            while not done():
                if self._inbox.poll(POLL_MS):
                    self._handle(self._decoder.decode(self._inbox.recv_multipart()))
                    continue
                self._check()
                if until is not None and time.monotonic() > until:
                    return False
        return True

    def _handle(self, message: Any) -> None:
        match message:
            case StepDone(rank, step, output, error):
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
                cause = pickle.loads(error)
                loaded = LOADED not in self._returned
                if loaded or not isinstance(cause, ValueError):
                    cause = WorkersLostError(f"rank {rank} ended: {type(cause).__name__}: {cause}")
                self._fatal = self._fatal or cause

    def _check(self) -> None:
        """Raise if a worker has ended."""
        if self._fatal is not None or self._processes.failure is not None:
            error = self._cause()
            assert error is not None
            self._processes.fail(str(error))
            raise error

    def _cause(self) -> Exception | None:
        """Why no call can be served any more. What a worker said last counts, if it said anything."""
        with self._lock:
            while self._fatal is None and self._inbox.poll(POLL_MS):
                self._handle(self._decoder.decode(self._inbox.recv_multipart()))
            if self._fatal is None and self._processes.failure is not None:
                self._fatal = WorkersLostError(self._processes.failure)
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
                time.sleep(0.0001)
            if self._board.get(rank, FAILED) == step:
                self._receive(lambda: step in self._errors)

    def _step_error(self, step: int) -> Exception:
        """That of the step, if all ranks came to its end: its requests end, whatever each rank knows of them. If one
        did not, it waits for what another never sends, and the engine ends."""
        errors = self._errors[step]

        def ended(rank: int) -> bool:
            board = self._board
            return rank in errors or (board.get(rank, DONE) >= step and board.get(rank, FAILED) < step)

        agreed = self._receive(lambda: all(map(ended, range(self._size))), time.monotonic() + AGREE_SECONDS)
        first = min(errors)
        cause = errors[first]
        if not agreed:
            waiting = ", ".join(str(rank) for rank in range(self._size) if not ended(rank))
            self._fatal = WorkersLostError(
                f"a step failed on rank {first}, and rank {waiting} did not end it: {cause.kind}: {cause.message}"
            )
            self._check()
        del self._errors[step]
        self._outputs.pop(step, None)
        return rebuilt(cause)


def _bind(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


def _nothing() -> None: ...


def _clean_up(
    processes: WorkerProcesses, folder: SocketFolder, context: zmq.Context, ring: Ring, board: StatusBoard
) -> None:
    processes.stop(0)
    folder.remove()
    context.destroy(linger=0)
    for memory in (ring, board):
        os.close(memory.fd)
