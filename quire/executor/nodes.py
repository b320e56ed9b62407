"""Workers of several machines, as the executor on node 0 sees them: its own, and links to the other nodes."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.config import EngineConfig
from quire.config.environment import QUIRE_CLUSTER_TOKEN
from quire.distributed.layout import WorldLayout
from quire.distributed.machine import address_towards, interface_of
from quire.executor.local_workers import LocalWorkers, Machine
from quire.executor.node_messages import (
    NODES,
    WORKERS,
    End,
    Hello,
    Welcome,
    cluster_token,
    difference,
    introduction,
    ranks_text,
    read_message,
    secure,
    watch_link,
    write_message,
)
from quire.executor.placement import device_count
from quire.executor.ranks import layout_of

logger = logging.getLogger("quire")

LINGER_MS = 1000  # for last messages to be sent in
POLL_MS = 100


def machine_of(config: EngineConfig, layout: WorldLayout) -> Machine:
    """Ranks are dealt to nodes in order, equally. They meet at the port after that of the plans."""
    parallel = config.parallel
    if parallel.nnodes == 1:
        return Machine(layout, range(layout.size))
    count = layout.size // parallel.nnodes
    first = parallel.node_rank * count
    try:
        master = socket.gethostbyname(parallel.master_addr)
        own = address_towards(master)
    except OSError as error:
        raise ValueError(f"{parallel.master_addr} cannot be reached: {error} (--master-addr)") from error
    loopback = "lo" if own.startswith("127.") else ""
    return Machine(
        layout,
        range(first, first + count),
        f"tcp://{master}:{parallel.master_port + 1}",
        interface_of(own) or loopback,
    )


class NodeLinks:
    """Connections to the other nodes, which connect to the one address given here. One thread at a time uses it; its
    own watches for connections that are lost."""

    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        token = cluster_token()
        self._nodes: dict[bytes, int] = {}  # by the socket's name of the connection
        self._connections: dict[int, bytes] = {}  # those names by file descriptor
        self._closed: set[int] = set()
        self._joined = False  # before, a node may come again
        self._refused = False  # somebody had another token
        self._lost: Callable[[int], None] | None = None
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        secure(self.socket, token, server=True)
        monitor = watch_link(self.socket, config.observability.engine_heartbeat_timeout)
        try:
            self.socket.bind(f"tcp://{socket.gethostbyname(parallel.master_addr)}:{parallel.master_port}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ValueError(_bind_problem(error, parallel.master_addr, parallel.master_port)) from error
        self._watcher = threading.Thread(target=self._watch, args=(monitor,), name="quire-nodes", daemon=True)
        self._watcher.start()

    def join(self, mine: Hello, nodes: int, needed: int, timeout: float) -> None:
        """Wait for all other nodes. ValueError if one differs from this, RuntimeError if one does not come."""
        until = time.monotonic() + timeout
        while len(self._nodes) < nodes - 1:
            if time.monotonic() > until:
                joined = set(self._nodes.values())
                missing = ", ".join(str(node) for node in range(1, nodes) if node not in joined)
                hint = f"; another {QUIRE_CLUSTER_TOKEN.name} was refused" if self._refused else ""
                raise RuntimeError(
                    f"node {missing} of {nodes} did not join within {timeout:g} s (--distributed-timeout-seconds){hint}"
                )
            if self.socket.poll(POLL_MS) and (problem := self._admit(mine, nodes, needed)):
                raise ValueError(problem)
        self._joined = True
        self.tell(Welcome())

    def _admit(self, mine: Hello, nodes: int, needed: int) -> str | None:
        name, *frames = self.socket.recv_multipart(copy=False)
        try:
            hello = read_message([frame.bytes for frame in frames])
        except ValueError as error:
            return f"a node of another version wants to join: {error}"
        descriptor = name.get(zmq.SRCFD)
        if not isinstance(hello, Hello) or descriptor in self._closed:
            return None
        problem = difference(mine, hello, needed)
        if not 0 < hello.node < nodes:
            problem = f"a node has --node-rank {hello.node}; allowed: 1 to {nodes - 1}"
        elif hello.node in self._nodes.values():
            problem = f"two nodes have --node-rank {hello.node}; each must have its own"
        self._nodes[name.bytes] = hello.node
        self._connections[descriptor] = name.bytes
        return problem

    def on_lost(self, notify: Callable[[int], None]) -> None:
        """`notify` is called, in a thread of its own, with each node whose connection is lost."""
        self._lost = notify
        for name in [name for descriptor, name in self._connections.items() if descriptor in self._closed]:
            notify(self._nodes[name])

    def tell(self, message: Any) -> None:
        frames = write_message(message)
        for name in list(self._nodes):
            self._send([name, *frames])

    def write(self, frames: Sequence[Any]) -> None:
        """To the workers of all other nodes."""
        for name in self._nodes:
            self._send([name, WORKERS, *frames])

    def read(self) -> Sequence[Any] | None:
        """A worker's answer, if the next message is one."""
        name, kind, *frames = self.socket.recv_multipart()
        if name in self._nodes and kind == WORKERS:
            return frames
        if kind == NODES and name not in self._nodes:
            self._send([name, *write_message(End("the engine runs already, with all its nodes"))])
        return None

    def close(self, cause: str | None) -> None:
        """The other nodes end. `cause`: unless in order."""
        self._lost = None
        self.tell(End(cause))
        self.socket.disable_monitor()
        self.socket.close(linger=LINGER_MS)
        self._watcher.join()
        self._context.term()

    def _send(self, frames: Sequence[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone, which is noticed
            self.socket.send_multipart(frames)

    def _watch(self, monitor: zmq.Socket) -> None:
        while True:
            event = recv_monitor_message(monitor)
            descriptor = event["value"]
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._closed.discard(descriptor)
                case zmq.EVENT_DISCONNECTED:
                    self._closed.add(descriptor)
                    name = self._connections.get(descriptor, b"")
                    if not self._joined:
                        self._nodes.pop(name, None)
                    elif name in self._nodes and self._lost is not None:
                        self._lost(self._nodes[name])
                case zmq.EVENT_MONITOR_STOPPED:
                    monitor.close()
                    return
                case _:
                    if not self._refused:
                        logger.warning("a connection with another %s was refused", QUIRE_CLUSTER_TOKEN.name)
                    self._refused = True


class ClusterWorkers:
    """As LocalWorkers, of all nodes."""

    def __init__(self, config: EngineConfig, layout: WorldLayout) -> None:
        parallel = config.parallel
        if parallel.node_rank:
            raise ValueError(
                f"node_rank is {parallel.node_rank}, but the engine runs on node 0; on other nodes run "
                "`quire serve MODEL --headless` with the same options (--node-rank)"
            )
        self._per_node = layout.size // parallel.nnodes
        machine = machine_of(config, layout)
        self._links = NodeLinks(config)
        self._ended = False
        try:
            devices = device_count(config)
            mine = introduction(config, devices)
            if problem := difference(mine, mine, self._per_node):
                raise ValueError(problem)
            self._links.join(mine, parallel.nnodes, self._per_node, parallel.distributed_timeout_seconds)
            self._local = LocalWorkers(config, machine)
        except BaseException as error:
            self._links.close(str(error) or type(error).__name__)
            raise
        self.board = self._local.board
        self._poller = zmq.Poller()
        for each in (self._links.socket, self._local.inbox):
            self._poller.register(each, zmq.POLLIN)
        self._links.on_lost(self._lose)

    @property
    def pids(self) -> list[int]:
        """Of this node's worker processes."""
        return self._local.pids

    @property
    def failure(self) -> str | None:
        return self._local.failure

    def on_failure(self, notify: Callable[[], None]) -> None:
        self._local.on_failure(notify)

    def fail(self, cause: str) -> None:
        self._local.fail(cause)
        if not self._ended:
            self._ended = True
            self._links.tell(End(cause))

    def write(self, frames: Sequence[Any]) -> None:
        self._links.write(frames)
        self._local.write(frames)

    def receive(self, milliseconds: int) -> Sequence[Any] | None:
        ready = dict(self._poller.poll(milliseconds))
        if self._links.socket in ready:
            return self._links.read()
        return self._local.receive(0) if ready else None

    def connected(self) -> None:
        self._local.connected()

    def stop(self, seconds: float) -> None:
        if not self._ended:
            self._ended = True
            self._links.tell(End(self.failure))
        self._local.stop(seconds)

    def close(self) -> None:
        cause = self.failure
        self._local.close()
        self._links.close(cause)

    def _lose(self, node: int) -> None:
        first = node * self._per_node
        ranks = ranks_text(range(first, first + self._per_node))
        self._local.fail(f"node {node} ({ranks}) is gone: its process has ended, or the link to it is lost")


Workers = LocalWorkers | ClusterWorkers


def start_workers(config: EngineConfig) -> Workers:
    layout = layout_of(config)
    if config.parallel.nnodes > 1:
        return ClusterWorkers(config, layout)
    return LocalWorkers(config, machine_of(config, layout))


def _bind_problem(error: Exception, address: str, port: int) -> str:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"port {port} of {address} is in use; give another one (--master-port)"
    if getattr(error, "errno", None) in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
        return f"{address} is not an address of this machine; node 0 needs one of its own (--master-addr)"
    return f"nodes cannot meet at {address}:{port}: {error} (--master-addr, --master-port)"
