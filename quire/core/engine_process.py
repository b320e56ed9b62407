"""An engine core in a process of its own: drain what came in, step, send what came out.

The engine's thread never touches a socket: two threads do, and talk to it through queues.
"""

import ctypes
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from quire.config import EngineConfig
from quire.core.engine_core import EngineCore
from quire.messages.protocol import (
    AddRequests,
    Call,
    Codec,
    Dead,
    FinishRequests,
    FromEngine,
    Hello,
    Outputs,
    Ready,
    Result,
    Shutdown,
    ToEngine,
)
from quire.messages.requests import EngineCoreOutputs, FinishReason

logger = logging.getLogger("quire")

CLIENT_SHIFT = 40  # a request's index is (client << CLIENT_SHIFT) + a number of the client's own
PR_SET_PDEATHSIG = 1

Incoming = tuple[bytes, Any]  # who says what


class EngineProcess:
    """Serves any number of front ends. Runs until told to stop, or until the process that started it is gone."""

    def __init__(self, make_core: Callable[[], EngineCore], address: str) -> None:
        self._in: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._addresses: dict[bytes, str] = {}  # front end -> where it listens
        self._clients: dict[int, str] = {}  # client number of an index -> where it listens
        self._ready: Ready | None = None
        self._stopping = False
        context = zmq.Context()
        self._io = [
            threading.Thread(target=self._receive, args=(context, address), name="quire-in", daemon=True),
            threading.Thread(target=self._send, args=(context,), name="quire-out", daemon=True),
        ]
        for thread in self._io:
            thread.start()
        self._make_core = make_core

    def run(self) -> int:
        """The exit code."""
        try:
            self.core = self._make_core()
            self._ready = Ready(self.core.max_model_len, self.core.summary)
            for address in self._addresses.values():
                self._out.put((address, self._ready))
            while not self._stopping:
                self._take_in(block=not self.core.has_unfinished())
                outputs = self.core.step()
                if outputs is not None and (len(outputs.index) or outputs.prompt_logprobs):
                    self._pass_on(outputs)
        except Exception as error:
            logger.exception("the engine ends")
            self._tell_all(Dead(f"{type(error).__name__}: {error}"))
            self._close()
            return 1
        self._tell_all(Dead("the engine was shut down"))
        self._close()
        return 0

    def _take_in(self, block: bool) -> None:
        """All that has arrived; if there is nothing to do, wait for something."""
        while not self._stopping:
            try:
                sender, message = self._in.get(block)
            except queue.Empty:
                return
            self._handle(sender, message)
            block = block and not self.core.has_unfinished()

    def _handle(self, sender: bytes, message: Any) -> None:
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._clients[request.index >> CLIENT_SHIFT] = self._addresses[sender]
                    try:
                        self.core.add_request(request)
                    except ValueError as error:
                        self._pass_on(EngineCoreOutputs.ended([request.index], FinishReason.ERROR, str(error)))
            case FinishRequests(request_ids):
                self.core.finish_requests(request_ids)
            case Call(number, "reset_prefix_cache"):
                self.core.reset_prefix_cache()
                self._out.put((self._addresses[sender], Result(number)))
            case Call(number, name):
                self._out.put((self._addresses[sender], Result(number, f"unknown call {name!r}")))
            case Hello(address):
                self._addresses[sender] = address
                if self._ready is not None:
                    self._out.put((address, self._ready))
            case Shutdown():
                self._stopping = True

    def _pass_on(self, outputs: EngineCoreOutputs) -> None:
        """To each front end what is its own."""
        if len(self._clients) == 1:
            (address,) = self._clients.values()
            self._out.put((address, Outputs(outputs)))
            return
        clients = set(np.unique(outputs.index >> CLIENT_SHIFT).tolist())
        clients |= {part.owner >> CLIENT_SHIFT for part in outputs.prompt_logprobs}
        for client in clients:
            part = outputs.select(client << CLIENT_SHIFT, (client + 1) << CLIENT_SHIFT)
            self._out.put((self._clients[client], Outputs(part)))

    def _tell_all(self, message: Any) -> None:
        for address in self._addresses.values():
            self._out.put((address, message))

    def _close(self) -> None:
        self._out.put(None)
        self._io[1].join(timeout=5)
        if hasattr(self, "core"):
            self.core.shutdown()

    def _receive(self, context: zmq.Context, address: str) -> None:
        codec = Codec(ToEngine)
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)
        while True:
            sender, *frames = socket.recv_multipart()
            try:
                message = codec.decode(frames)
            except ValueError as error:
                logger.warning("ignored: %s", error)
                continue
            if isinstance(message, Hello) and self._ready is None:
                self._addresses[sender] = message.output_address  # the engine is loading and hears nothing yet
            else:
                self._in.put((sender, message))

    def _send(self, context: zmq.Context) -> None:
        codec = Codec(FromEngine)
        sockets: dict[str, zmq.Socket] = {}
        while (item := self._out.get()) is not None:
            address, message = item
            if address not in sockets:
                socket = sockets[address] = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, 1000)
                socket.setsockopt(zmq.SNDHWM, 0)  # a slow front end is its own problem: the engine never waits for it
                socket.connect(address)
            sockets[address].send_multipart(codec.encode(message), copy=False)
        for socket in sockets.values():
            socket.close()


def die_with_parent() -> None:
    """No orphans: the kernel ends this process when the one that started it is gone."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() == 1:
        os._exit(1)  # it went before we asked


def engine_process_main(config: EngineConfig, address: str) -> None:
    """What the started process runs."""
    die_with_parent()
    # Before torch is imported. libgomp's threads would spin for milliseconds between operations on cores that front
    # ends need; sleeping at once costs a single request a third of its speed. docs/performance.md has the figures.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the front end, which tells us

    def make_core() -> EngineCore:
        from quire.executor.uniproc import UniProcExecutor
        from quire.platforms.defaults import with_platform_defaults

        complete = with_platform_defaults(config)
        return EngineCore(complete, UniProcExecutor(complete))

    os._exit(EngineProcess(make_core, address).run())
