"""Starts an engine process, and connects front ends to it."""

import atexit
import logging
import multiprocessing.util  # noqa: F401  # its exit handler joins child processes: it must be registered before ours
import signal
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq

from quire.config import EngineConfig
from quire.core.engine_start import EngineStart
from quire.distributed.socket_folder import SocketFolder
from quire.engine.async_engine import EngineDeadError
from quire.messages.protocol import Codec, Dead, FromEngine, Goodbye, Hello, Ready, Shutdown


class EngineHost:
    """An engine process, started here, and the folder of sockets through which front ends connect."""

    def __init__(self, config: EngineConfig, start: EngineStart | None = None) -> None:
        """`start`: a process that is there already."""
        self._sockets = SocketFolder()
        self.folder = self._sockets.path
        start = start or EngineStart(config)
        self.process = start.process
        self._kill_and_clean_up = weakref.finalize(self, _kill_and_clean_up, self.process, self._sockets)
        self._kill_and_clean_up.atexit = False
        atexit.register(self._kill_and_clean_up)
        start.proceed(config, engine_address(self.folder), logging.getLogger("quire").getEffectiveLevel())

    def all_connected(self) -> None:
        """Remove the sockets' files: connected sockets do not need them, and none can be left behind."""
        self._sockets.remove()

    def check_alive(self) -> None:
        if not self.process.is_alive():
            raise EngineDeadError(f"the engine process {how_it_ended(self.process)}")

    def join(self, timeout: float) -> None:
        """Wait for the engine to exit, then kill it; leaves no process and no file behind."""
        self.process.join(timeout)
        self._kill_and_clean_up()
        atexit.unregister(self._kill_and_clean_up)


class EngineChannel:
    """A front end's sockets. `send` must be used from one thread, `receive` from one (possibly another) thread."""

    def __init__(self, folder: Path, client: int | None = 0) -> None:
        """`folder` is the EngineHost's. `client` is this front end's number, or None if it sends no requests."""
        self.client = client
        self._context = zmq.Context()
        self._encoder, self._decoder = Codec(), Codec(FromEngine)
        self._to_engine = self._socket(zmq.DEALER)
        self._from_engine = self._socket(zmq.PULL)
        output_address = f"ipc://{folder}/out-{'host' if client is None else client}"
        self._from_engine.bind(output_address)
        self._to_engine.connect(engine_address(folder))
        self.send(Hello(output_address, client))

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded; raises EngineDeadError, with the cause, if that fails."""
        while True:
            message = self.receive(timeout=0.1)
            if isinstance(message, Ready):
                return message
            if isinstance(message, Dead):
                raise EngineDeadError(message.cause)
            if message is None:
                self.check_alive()

    def send(self, message: Any) -> None:
        self._to_engine.send_multipart(self._encoder.encode(message), copy=False)

    def receive(self, timeout: float) -> Any | None:
        """The next message, or None after `timeout` seconds."""
        if not self._from_engine.poll(round(timeout * 1000)):
            return None
        return self._decoder.decode(self._from_engine.recv_multipart())

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine has exited and all its messages have been received. Does nothing here:
        front ends of a shared engine are informed by the process that started it."""

    def close(self, timeout: float = 10.0) -> None:
        """Unregister: the engine aborts this front end's requests and keeps running."""
        if self.client is not None:
            self.send(Goodbye(self.client))
        self._context.destroy(linger=200)  # milliseconds to send the Goodbye

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket


class EngineConnection(EngineChannel):
    """A channel to an engine that is started here and stopped by `close`."""

    def __init__(self, config: EngineConfig, client: int | None = 0, start: EngineStart | None = None) -> None:
        self.host = EngineHost(config, start)
        super().__init__(self.host.folder, client)

    def wait_ready(self) -> Ready:
        ready = super().wait_ready()
        if self.client is not None:
            self.host.all_connected()  # the only front end
        return ready

    def check_alive(self) -> None:
        if not self.host.process.is_alive() and not self._from_engine.poll(100):  # its last message may be in transit
            self.host.check_alive()

    def close(self, timeout: float = 10.0) -> None:
        """Ask the engine to stop, then kill it; leaves no process, socket or file behind."""
        if self.host.process.is_alive():
            self.send(Shutdown())
        self.host.join(timeout)
        self._context.destroy(linger=0)


def engine_address(folder: Path) -> str:
    return f"ipc://{folder}/in"


def how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill_and_clean_up(process: BaseProcess, sockets: SocketFolder) -> None:
    if process.is_alive():
        process.kill()
        process.join()
    sockets.remove()
