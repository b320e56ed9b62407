"""A machine with workers only: it joins node 0, passes plans on to its workers, and their answers back."""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config import EngineConfig
from quire.config.environment import QUIRE_CLUSTER_TOKEN
from quire.executor.local_workers import LocalWorkers
from quire.executor.node_messages import (
    WORKERS,
    End,
    Welcome,
    cluster_token,
    introduction,
    ranks_text,
    read_message,
    secure,
    watch_link,
    write_message,
)
from quire.executor.nodes import LINGER_MS, POLL_MS, machine_of
from quire.executor.placement import device_count
from quire.executor.ranks import layout_of
from quire.executor.step_errors import WorkersLostError
from quire.executor.worker_messages import NodeLost
from quire.messages.protocol import Codec

logger = logging.getLogger("quire")

STOP_SECONDS = 5.0  # for workers to end by themselves
REFUSALS = 3  # handshakes that fail before it is clear that node 0 has another token: one may as well fail as it ends


class HeadlessNode:
    def __init__(self, config: EngineConfig) -> None:
        """`config` is complete: that of an engine process."""
        parallel = config.parallel
        if not parallel.node_rank:
            raise ValueError(
                "--headless is for machines with workers only, of --nnodes with a --node-rank of 1 or more; leave it "
                "out where the engine runs"
            )
        self._config, self._node = config, parallel.node_rank
        self._machine = machine_of(config, layout_of(config))
        self._timeout = parallel.distributed_timeout_seconds
        self._name = f"node 0 at {parallel.master_addr}:{parallel.master_port}"
        token = cluster_token()
        self._wake_fd = os.eventfd(0)
        self._signal: int | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        secure(self._socket, token, server=False)
        self._monitor = watch_link(self._socket, config.observability.engine_heartbeat_timeout)
        self._socket.connect(f"tcp://{socket.gethostbyname(parallel.master_addr)}:{parallel.master_port}")

    def run(self) -> int:
        """Until the engine ends: the exit code."""
        with self._signals():
            try:
                cause = self._join() or self._work()
            finally:
                self._socket.disable_monitor()
                self._monitor.close()
                self._socket.close(linger=LINGER_MS)
                self._context.term()
                os.close(self._wake_fd)
        if self._signal is not None:
            logger.info("node %d has ended by %s", self._node, signal.Signals(self._signal).name)
            return 128 + self._signal
        if cause:
            logger.error("node %d has ended: %s", self._node, cause)
        else:
            logger.info("node %d has ended, with the engine", self._node)
        return 1 if cause else 0

    def _join(self) -> str | None:
        """None once all nodes have joined, or why this one cannot."""
        self._socket.send_multipart(write_message(introduction(self._config, device_count(self._config))))
        logger.info("node %d waits for %s", self._node, self._name)
        until, refusals = time.monotonic() + self._timeout, 0
        while time.monotonic() < until and self._signal is None:
            if self._socket.poll(POLL_MS):
                match read_message(self._socket.recv_multipart()):
                    case Welcome():
                        return None
                    case End(cause):
                        return f"{self._name} refuses: {cause}"
            while self._monitor.poll(0):
                refusals += recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if refusals >= REFUSALS:
                return f"{self._name} refuses the connection: its {QUIRE_CLUSTER_TOKEN.name} is another one"
        return (
            f"{self._name} did not answer, or other nodes did not join, within {self._timeout:g} s "
            "(--distributed-timeout-seconds)"
        )

    def _work(self) -> str | None:
        """None if the engine ends in order, or why this node ends."""
        logger.info("node %d of %d has %s", self._node, self._config.parallel.nnodes, ranks_text(self._machine.ranks))
        try:
            workers = LocalWorkers(self._config, self._machine)
        except ValueError as error:
            return self._tell_lost(str(error))
        try:
            workers.on_failure(lambda: os.eventfd_write(self._wake_fd, 1))
            return self._pass_on(workers)
        finally:
            workers.close()

    def _pass_on(self, workers: LocalWorkers) -> str | None:
        poller = zmq.Poller()
        for each in (self._socket, workers.inbox, self._monitor, self._wake_fd):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if workers.inbox in ready:
                self._answer(workers)
            elif self._wake_fd in ready:
                while workers.inbox.poll(POLL_MS):  # what they said last
                    self._answer(workers)
                name = "by signal" if self._signal is None else f"by {signal.Signals(self._signal).name}"
                return self._tell_lost(workers.failure or f"it was ended {name}")
            elif self._socket in ready:
                kind, *frames = self._socket.recv_multipart()
                if kind == WORKERS:
                    with contextlib.suppress(WorkersLostError):  # the wake-up that follows says so
                        workers.write(frames)
                elif isinstance(end := read_message([kind, *frames]), End):
                    workers.stop(STOP_SECONDS if end.cause is None else 0)
                    return end.cause
            elif recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                return f"{self._name} has ended, or the link to it is lost"

    def _answer(self, workers: LocalWorkers) -> None:
        self._socket.send_multipart([WORKERS, *workers.inbox.recv_multipart()])

    def _tell_lost(self, cause: str) -> str:
        self._socket.send_multipart([WORKERS, *Codec().encode(NodeLost(self._node, cause))])
        return cause

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, frame: Any) -> None:
            self._signal = number
            os.eventfd_write(self._wake_fd, 1)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
