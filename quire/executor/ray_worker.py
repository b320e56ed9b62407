"""A worker in a Ray actor. Calls of an actor are run in order; results and heartbeats have threads of their own."""

import dataclasses
import logging
import os
import pickle
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.config.environment import GLOO_SOCKET_IFNAME, receive_forwarded
from quire.config.logs import set_up_logging
from quire.distributed.layout import WorldLayout
from quire.distributed.machine import free_port, interface_of, machine_id
from quire.executor.base import PendingOutput
from quire.executor.step_errors import launched, told
from quire.executor.worker_calls import pickled_error
from quire.executor.worker_messages import (
    LOADED,
    Execute,
    Invoke,
    Returned,
    Sample,
    StepDone,
    Stop,
    ToWorker,
    WritableCodec,
)
from quire.messages.protocol import Codec

logger = logging.getLogger("quire")

RESULTS, BEATS = "results", "beats"  # Ray's concurrency groups, of one thread each
METHODS = {"result": RESULTS, "beat": BEATS}  # all others are in the default group, in order


@dataclass(frozen=True)
class Seat:
    """Where an actor is."""

    node: str
    machine: str  # several nodes of Ray may share one
    ip: str
    pid: int
    free_port: int  # for ranks to meet at


@dataclass
class RayStart:
    """What an actor is told before it loads the model."""

    config: EngineConfig
    rank: int
    layout: WorldLayout
    address: str  # where ranks meet
    backend: str
    timeout: float  # seconds to meet in, and to wait in a collective
    on_machine: int  # ranks that share its machine's cores
    environment: Mapping[str, str]
    log_level: int


class RayWorker:
    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[int, PendingOutput | StepDone, int]] = queue.SimpleQueue()
        self._encoder, self._codec = Codec(), WritableCodec(ToWorker)

    def seat(self) -> Seat:
        import ray

        ip = ray.util.get_node_ip_address()
        return Seat(ray.get_runtime_context().get_node_id(), machine_id(), ip, os.getpid(), free_port(ip))

    def start(self, data: bytes) -> list[Any]:
        """Meet the other ranks and load the model: a Returned, as of every call."""
        try:
            self._start(pickle.loads(data))
            return self._encoder.encode(Returned(self._rank, LOADED, pickle.dumps(None)))
        except BaseException as error:
            logger.debug("the worker cannot start", exc_info=True)
            return self._encoder.encode(Returned(-1, LOADED, error=pickled_error(error)))

    def _start(self, start: RayStart) -> None:
        receive_forwarded(start.environment)  # before torch is imported
        quiet = start.rank > 0
        level = max(start.log_level, logging.WARNING) if quiet else start.log_level
        set_up_logging(level, start.config.observability.log_config_file, name=f"rank {start.rank}")
        if name := interface_of(self.seat().ip):
            GLOO_SOCKET_IFNAME.set_default(name)

        from quire.distributed.world import World
        from quire.executor.uniproc import UniProcExecutor
        from quire.platforms import cpu_cores
        from quire.worker.worker import Worker

        self._rank = start.rank
        world = World.connect(start.rank, start.layout, start.address, start.backend, start.timeout, local_rank=0)
        self._world = world
        config, device = start.config, start.config.device
        if start.backend == "gloo":
            threads = max(1, cpu_cores.choose_threads(device.cpu_threads) // start.on_machine)
            device = dataclasses.replace(device, cpu_threads=threads, cpu_pin=device.cpu_pin and start.on_machine == 1)
        load = dataclasses.replace(config.load, use_tqdm_on_load=config.load.use_tqdm_on_load and not quiet)
        config = config.replace(load=load, device=device)
        self._executor = UniProcExecutor(config, lambda config: Worker(config, world), in_place=True)
        self._launches_async = self._executor.worker.platform.launches_async

    def run(self, *frames: bytes) -> list[Any] | None:
        """One message of the executor. Only a call of a method has an answer; that of a step is its `result`."""
        match self._codec.decode(frames):
            case Execute(plan):
                self._executor.execute_model(plan)
            case Sample(step, grammar):
                pending = self._executor.sample_tokens(grammar)
                place = 0 if launched(pending) else self._executor.worker.num_exchanges
                # Only a device computes on while further plans come.
                self._done.put((step, pending if self._launches_async else self._finish(step, pending, place), place))
            case Invoke(number, call):
                return self._encoder.encode(self._invoke(number, call))
            case Stop():
                self._world.close()
        return None

    def result(self) -> list[Any]:
        """A StepDone of the next step; without an output from ranks that do not answer."""
        step, found, place = self._done.get()
        return Codec().encode(found if isinstance(found, StepDone) else self._finish(step, found, place))

    def beat(self, seconds: float) -> None:
        """Says that this process lives, at intervals of so many seconds."""
        time.sleep(seconds)

    def _finish(self, step: int, pending: PendingOutput, place: int) -> StepDone:
        """`place`: where it failed, if it was not launched to its end."""
        try:
            output = pending.result()
            return StepDone(self._rank, step, output if self._world.answers else None)
        except BaseException as error:
            logger.log(logging.ERROR if self._world.answers else logging.DEBUG, "a step failed", exc_info=True)
            return StepDone(self._rank, step, error=told(error, place))

    def _invoke(self, number: int, call: bytes) -> Returned:
        try:
            method, args, kwargs = pickle.loads(call)
            (value,) = self._executor.collective_rpc(method, args, kwargs)
            return Returned(self._rank, number, pickle.dumps(value))
        except BaseException as error:
            logger.debug("a call failed", exc_info=True)
            return Returned(self._rank, number, error=pickled_error(error))


def remote_class(ray: Any) -> Any:
    """RayWorker as Ray's actors are made from."""
    for name, group in METHODS.items():
        ray.method(concurrency_group=group)(getattr(RayWorker, name))  # marks the function itself
    return ray.remote(concurrency_groups={RESULTS: 1, BEATS: 1})(RayWorker)


def plain(frames: Sequence[Any]) -> list[bytes]:
    """Arrays that are views of our memory cannot be sent as they are."""
    return [bytes(frame) for frame in frames]
