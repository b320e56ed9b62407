"""A Ray actor for each rank, in a placement group: placed, watched, and ended together."""

import atexit
import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from quire.config.environment import RAY_ADDRESS
from quire.distributed.machine import machine_id
from quire.executor.ray_worker import Seat, remote_class
from quire.executor.worker_processes import beat_seconds

logger = logging.getLogger("quire")

STOP_SECONDS = 5.0  # for actors to end in
KILL_SECONDS = 0.5  # for Ray to end them in
CONNECT_SECONDS = 10.0  # to reach the cluster in
PLACING_SECONDS = 1  # between looks at what the cluster has; Ray wants a whole number


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(
            f"distributed_executor_backend 'ray' needs Ray, which cannot be imported ({error}): pip install quire[ray]"
        ) from error


class RayActors:
    def __init__(self, ranks: int, resource: str, amount: int, timeout: float, heartbeat_timeout: float) -> None:
        """Started within `timeout` seconds, or an error that says what the cluster has. `amount` of Ray's `resource`
        ("GPU", "CPU") is each rank's."""
        self.failure: str | None = None  # which actor ended, and how
        self.on_failure: Callable[[], None] | None = None  # called, in a thread of its own, once there is one
        self.ray = ray = import_ray()
        self._limit, self._stopped = heartbeat_timeout, threading.Event()
        self._own_ray = not ray.is_initialized()
        self._group: Any = None
        self._watcher: threading.Thread | None = None
        self.actors: list[Any] = []  # by rank
        self.seats: list[Seat] = []
        self._beats: list[Any] = []
        self._processes: dict[int, int] = {}  # descriptors of those on this machine, by rank
        if self._own_ray:
            _connect(ray)
        atexit.register(self.stop)  # before Ray's own, after which every call would start Ray again
        try:
            self._place(ranks, resource, amount, time.monotonic() + timeout, timeout)
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="quire-ray-actors", daemon=True)
        self._watcher.start()

    def fail(self, cause: str) -> None:
        """End all actors because of `cause`."""
        self.failure = self.failure or cause
        self._stopped.set()

    def stop(self) -> None:
        """No actor is left when this returns, and no placement group."""
        atexit.unregister(self.stop)
        self._stopped.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._end()
        if self._own_ray:
            self.ray.shutdown()

    def name(self, rank: int) -> str:
        seat = self.seats[rank]
        return f"the Ray actor of rank {rank} (process {seat.pid} on {seat.ip})"

    def lost(self, rank: int, error: BaseException) -> str:
        if isinstance(error, self.ray.exceptions.RayActorError):
            return self.gone(rank)
        return f"{self.name(rank)} has failed: {error}"

    def gone(self, rank: int) -> str:
        return f"{self.name(rank)} has ended: it was killed, by a user or for want of memory, or its node is gone"

    def _place(self, ranks: int, resource: str, amount: int, end: float, timeout: float) -> None:
        ray, limit = self.ray, f"within {timeout:g} s (--distributed-timeout-seconds)"
        need = f"{ranks} ranks need {amount} {resource} each"
        while True:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            if sum(int(node["Resources"].get(resource, 0) // amount) for node in nodes) < ranks:
                raise ValueError(
                    f"{need}, but the Ray cluster has {_sizes(nodes, resource)}; lower tensor_parallel_size x "
                    "pipeline_parallel_size, or add nodes"
                )
            # As few nodes as it fits on.
            self._group = self._group or ray.util.placement_group([{resource: amount}] * ranks, strategy="PACK")
            if self._group.wait(min(PLACING_SECONDS, max(0.0, end - time.monotonic()))):
                break
            if time.monotonic() >= end:
                free = ray.available_resources().get(resource, 0)
                raise RuntimeError(
                    f"{need}, and were not placed {limit}: the Ray cluster has {_sizes(nodes, resource)}, of which "
                    f"{free:g} {'is' if free == 1 else 'are'} free now"
                )
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        made, actor = [], remote_class(ray)
        for bundle in range(ranks):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            made.append(
                actor.options(
                    num_cpus=amount if resource == "CPU" else 0,
                    num_gpus=amount if resource == "GPU" else 0,
                    scheduling_strategy=place,
                ).remote()
            )
        self.actors = made
        seats = [actor.seat.remote() for actor in made]
        _, late = ray.wait(seats, num_returns=ranks, timeout=max(0.0, end - time.monotonic()))
        if late:
            raise RuntimeError(f"{len(late)} of {ranks} Ray actors did not start {limit}")
        # Ranks that share layers are neighbours: on one node where possible, the engine's first.
        here = ray.get_runtime_context().get_node_id()
        found = sorted(zip(made, ray.get(seats), strict=True), key=lambda one: (one[1].node != here, one[1].node))
        self.actors, self.seats = [actor for actor, _ in found], [seat for _, seat in found]
        machine = machine_id()
        for rank, seat in enumerate(self.seats):
            if seat.machine == machine != "":
                with contextlib.suppress(ProcessLookupError):  # the heartbeat says so
                    self._processes[rank] = os.pidfd_open(seat.pid)

    def _watch(self) -> None:
        """One that has ended fails its pending heartbeat as soon as Ray knows, which takes seconds if a whole node is
        gone: those on this machine are watched as well. One that is stopped lets it wait."""
        ray, tick = self.ray, beat_seconds(self._limit)
        self._beats = [actor.beat.remote(tick) for actor in self.actors]
        since = [time.monotonic()] * len(self.actors)
        while not self._stopped.is_set():
            ready, _ = ray.wait(self._beats, timeout=min(0.1, tick))
            now = time.monotonic()
            for rank, process in self._processes.items():
                if select.select([process], [], [], 0)[0]:
                    self.fail(self.gone(rank))
            for beat in ready:
                rank = self._beats.index(beat)
                try:
                    ray.get(beat)
                except Exception as error:
                    self.fail(self.lost(rank, error))
                    break
                self._beats[rank], since[rank] = self.actors[rank].beat.remote(tick), now
            for rank, last in enumerate(since):
                if self._limit and now - last > self._limit + tick:
                    self.fail(f"{self.name(rank)} has not responded for {self._limit:g} s (--engine-heartbeat-timeout)")
        if self.failure is not None:
            self._end()
            if self.on_failure is not None:
                self.on_failure()

    def _end(self) -> None:
        ray, actors, self.actors = self.ray, self.actors, []
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        processes, self._processes = list(self._processes.values()), {}
        end = time.monotonic() + KILL_SECONDS
        for process in processes:
            select.select([process], [], [], max(0.0, end - time.monotonic()))
        for process in processes:  # Ray only asks one that is stopped
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        end = time.monotonic() + STOP_SECONDS
        for process in processes:
            select.select([process], [], [], max(0.0, end - time.monotonic()))
            os.close(process)
        if self._group is not None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
            self._group = None


def _connect(ray: Any) -> None:
    """To the cluster that RAY_ADDRESS or this machine names; without one, Ray starts one of this machine."""
    host, _, port = RAY_ADDRESS.get().partition(":")
    try:
        if port.isdecimal():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        where = f" at {RAY_ADDRESS.get()} (RAY_ADDRESS)" if RAY_ADDRESS.is_set() else ""
        raise ValueError(f"the Ray cluster{where} cannot be reached: {error}") from error


def _sizes(nodes: list[dict[str, Any]], resource: str) -> str:
    sizes = [node["Resources"].get(resource, 0) for node in nodes]
    count = f"{len(nodes)} node" + ("" if len(nodes) == 1 else "s")
    return f"{sum(sizes):g} {resource} on {count} ({' + '.join(f'{size:g}' for size in sizes)})"
