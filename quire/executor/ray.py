"""Workers in Ray actors, on one machine or several."""

import dataclasses
import itertools
import logging
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.config import EngineConfig
from quire.config.environment import forwarded
from quire.executor.base import PendingOutput, WorkerMethod
from quire.executor.multiproc import AGREE_SECONDS
from quire.executor.ranks import (
    answering_rank,
    describe_layout,
    layout_of,
    no_transfer,
    refuse_connectors,
)
from quire.executor.ray_actors import STOP_SECONDS, RayActors
from quire.executor.ray_worker import RayStart, plain
from quire.executor.remote import RemoteExecutor
from quire.executor.stages import memory_of_all
from quire.executor.step_errors import WorkersLostError, diverged, out_of_step, rebuilt
from quire.executor.worker_messages import FromWorker, Invoke, Returned, StepDone, Stop
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import ModelRunnerOutput
from quire.messages.protocol import Codec
from quire.platforms import platform_class

logger = logging.getLogger("quire")

POLL_SECONDS = 0.1  # between looks at whether all actors live


class StepOutput:
    def __init__(self, wait: Callable[[Sequence[Any]], ModelRunnerOutput], answers: Sequence[Any]) -> None:
        self._wait, self._answers = wait, answers

    def result(self) -> ModelRunnerOutput:
        return self._wait(self._answers)


class RayExecutor(RemoteExecutor):
    """Every plan is a call of every actor, which Ray runs in order; the rank that samples answers."""

    def __init__(self, config: EngineConfig) -> None:
        refuse_connectors(config, "ray")
        self._layout = layout_of(config)
        self._size = self._layout.size
        self._answers = answering_rank(self._layout)
        super().__init__()
        self._numbers = itertools.count()
        self._fatal: Exception | None = None
        self._decoder = Codec(FromWorker)
        self._on_gpus = platform_class(config.device.device).has_own_memory
        timeout = config.parallel.distributed_timeout_seconds
        threads = max(1, (config.device.cpu_threads or 1) // self._size)
        resource, amount = ("GPU", 1) if self._on_gpus else ("CPU", threads)
        self._actors = RayActors(self._size, resource, amount, timeout, config.observability.engine_heartbeat_timeout)
        self._ray = self._actors.ray
        # Even without a call of shutdown().
        self._clean_up = weakref.finalize(self, self._actors.stop)
        try:
            self._start(config, timeout)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, config: EngineConfig, timeout: float) -> None:
        seats = self._actors.seats
        self._on_machine = Counter(seat.machine for seat in seats)
        name = "cuda" if self._on_gpus else "cpu"  # Ray shows each actor its own GPU only
        config = config.replace(device=dataclasses.replace(config.device, device=name))
        told = [
            RayStart(
                config=config,
                rank=rank,
                layout=self._layout,
                address=f"tcp://{seats[0].ip}:{seats[0].free_port}",
                backend="nccl" if self._on_gpus else "gloo",
                timeout=timeout,
                on_machine=self._on_machine[seat.machine],
                environment=forwarded(),
                log_level=logger.getEffectiveLevel(),
            )
            for rank, seat in enumerate(seats)
        ]
        pairs = zip(self._actors.actors, told, strict=True)
        self._values([actor.start.remote(pickle.dumps(start)) for actor, start in pairs])

    @property
    def pids(self) -> list[int]:
        """Of the actors, by rank."""
        return [seat.pid for seat in self._actors.seats]

    def on_failure(self, notify: Callable[[Exception], None]) -> None:
        this = weakref.ref(self)

        def tell() -> None:
            executor = this()
            if executor is not None:
                notify(executor._lost())

        self._actors.on_failure = tell
        if self._actors.failure is not None:
            tell()

    def kv_cache_memory(self) -> int:
        """What fits every rank. Ranks on the CPUs of a machine share its memory."""
        shares = [1 if self._on_gpus else self._on_machine[seat.machine] for seat in self._actors.seats]
        memory = [size // share for size, share in zip(self._call("kv_cache_memory"), shares, strict=True)]
        return min(memory) if self._layout.stages == 1 else memory_of_all(memory, self._call("kv_cache_specs"))

    def initialize_kv_cache(self, config: KVCacheConfig, max_model_len: int, on_transfer: Callable[[], None]) -> None:
        self._call("initialize_kv_cache", config, max_model_len, no_transfer)

    def _write(self, frames: Sequence[Any]) -> None:
        self._send(frames)

    def _pending(self) -> PendingOutput:
        return StepOutput(self._result, [actor.result.remote() for actor in self._actors.actors])

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A function must be one that workers can import."""
        call = pickle.dumps((method, tuple(args), dict(kwargs)))
        return self._values(self._send(self._encoder.encode(Invoke(next(self._numbers), call))))

    def describe(self) -> str:
        nodes = len({seat.node for seat in self._actors.seats})
        where = f"on {nodes} Ray node{'' if nodes == 1 else 's'}"
        return f"{describe_layout(self._layout)} {where}, each {self._call('describe')[0]}"

    def shutdown(self) -> None:
        if not self._clean_up.alive:
            return
        if self._actors.failure is None:
            try:
                self._ray.wait(self._send(self._encoder.encode(Stop())), num_returns=self._size, timeout=STOP_SECONDS)
            except Exception:
                logger.debug("actors cannot be told to end", exc_info=True)
        self._clean_up()

    def _send(self, frames: Sequence[Any]) -> list[Any]:
        self._check()
        sent = plain(frames)
        return [actor.run.remote(*sent) for actor in self._actors.actors]

    def _values(self, answers: Sequence[Any]) -> list[Any]:
        """What each rank returned; the error of the first that failed."""
        replies: dict[int, Returned] = {}
        self._wait(answers, replies, lambda: len(replies) == self._size)
        for rank in range(self._size):
            if (error := replies[rank].error) is not None:
                raise pickle.loads(error)
        return [pickle.loads(replies[rank].value) for rank in range(self._size)]

    def _result(self, answers: Sequence[Any]) -> ModelRunnerOutput:
        done: dict[int, StepDone] = {}
        self._wait(answers, done, lambda: len(done) == self._size or any(one.error for one in done.values()))
        if not any(one.error for one in done.values()):
            output = done[self._answers].output
            assert output is not None
            return output
        self._wait(answers, done, lambda: len(done) == self._size, time.monotonic() + AGREE_SECONDS)
        errors = {rank: one.error for rank, one in done.items() if one.error is not None}
        first = min(errors)
        if len(errors) < self._size:
            self._fatal = diverged(first, errors[first])
        else:
            self._fatal = out_of_step(errors, self._layout)
        self._check()
        raise rebuilt(errors[first])

    def _wait(
        self, answers: Sequence[Any], found: dict[int, Any], done: Callable[[], bool], until: float | None = None
    ) -> None:
        """Read answers, by rank, until `done` or until then. Raises once an actor has ended."""
        while not done() and (until is None or time.monotonic() < until):
            missing = {answer: rank for rank, answer in enumerate(answers) if rank not in found}
            ready, _ = self._ray.wait(list(missing), timeout=POLL_SECONDS)
            for answer in ready:
                rank = missing[answer]
                try:
                    found[rank] = self._decoder.decode(self._ray.get(answer))
                except Exception as error:
                    self._actors.fail(self._actors.lost(rank, error))
            self._check()

    def _check(self) -> None:
        """Raise if an actor has ended."""
        if self._fatal is not None or self._actors.failure is not None:
            error = self._lost()
            self._actors.fail(str(error))
            raise error

    def _lost(self) -> Exception:
        """Why no call can be served any more."""
        if self._fatal is None:
            self._fatal = WorkersLostError(self._actors.failure)
        return self._fatal
