"""Starting an engine process, and the wires to it."""

import atexit
import logging
import multiprocessing
import multiprocessing.util  # its handler at exit waits for child processes: it must be registered before ours
import signal
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq

from quire.config import EngineConfig
from quire.core.engine_process import engine_process_main
from quire.engine.async_engine import EngineDeadError
from quire.engine.socket_folder import SocketFolder
from quire.messages.protocol import Codec, Dead, FromEngine, Goodbye, Hello, Ready, Shutdown

# A fresh interpreter for every process: a fork would take along threads' locks and whatever else its parent holds.
SPAWN = multiprocessing.get_context("spawn")


class EngineHost:
    """An engine process, started here, and the folder with the sockets through which front ends find it."""

    def __init__(self, config: EngineConfig) -> None:
        self._sockets = SocketFolder()
        self.folder = self._sockets.path
        self.process = SPAWN.Process(
            target=engine_process_main,
            args=(config, engine_address(self.folder), logging.getLogger("quire").getEffectiveLevel()),
            name="quire-engine",
        )
        self._abandon = weakref.finalize(self, _abandon, self.process, self._sockets)
        self._abandon.atexit = False
        atexit.register(self._abandon)
        self.process.start()

    def all_connected(self) -> None:
        """A connected socket needs its file no longer, so none can be left behind, however this process ends."""
        self._sockets.remove()

    def check_alive(self) -> None:
        if not self.process.is_alive():
            raise EngineDeadError(f"the engine process {how_it_ended(self.process)}")

    def join(self, timeout: float) -> None:
        """Wait for the engine's end, then bring it about; leaves no process and no file behind."""
        self.process.join(timeout)
        self._abandon()
        atexit.unregister(self._abandon)


class EngineWire:
    """One front end's side. `send` belongs to one thread and `receive` to one (possibly another) thread."""

    def __init__(self, folder: Path, client: int | None = 0) -> None:
        """`folder` is the host's. `client` is this front end's number, or None if it will send no requests."""
        self.client = client
        self._context = zmq.Context()
        self._codec_out, self._codec_in = Codec(FromEngine), Codec(FromEngine)
        self._to_engine = self._socket(zmq.DEALER)
        self._from_engine = self._socket(zmq.PULL)
        output_address = f"ipc://{folder}/out-{'host' if client is None else client}"
        self._from_engine.bind(output_address)
        self._to_engine.connect(engine_address(folder))
        self.send(Hello(output_address, client))

    def wait_ready(self) -> Ready:
        """Until the model is loaded; EngineDeadError, with the cause, if that fails."""
        while True:
            message = self.receive(timeout=0.1)
            if isinstance(message, Ready):
                return message
            if isinstance(message, Dead):
                raise EngineDeadError(message.cause)
            if message is None:
                self.check_alive()

    def send(self, message: Any) -> None:
        self._to_engine.send_multipart(self._codec_out.encode(message), copy=False)

    def receive(self, timeout: float) -> Any | None:
        """The next message, or None after so many seconds."""
        if not self._from_engine.poll(round(timeout * 1000)):
            return None
        return self._codec_in.decode(self._from_engine.recv_multipart())

    def check_alive(self) -> None:
        """EngineDeadError if the engine is known to have ended and all that it said has been received. Whoever started
        the engine tells front ends in other processes of its death."""

    def close(self, timeout: float = 10.0) -> None:
        """The engine forgets this front end's requests, and goes on."""
        if self.client is not None:
            self.send(Goodbye(self.client))
        self._context.destroy(linger=200)  # milliseconds for the last word

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket


class EngineConnection(EngineWire):
    """An engine of one's own: started here, ended with `close`."""

    def __init__(self, config: EngineConfig, client: int | None = 0) -> None:
        self.host = EngineHost(config)
        super().__init__(self.host.folder, client)

    def wait_ready(self) -> Ready:
        ready = super().wait_ready()
        if self.client is not None:
            self.host.all_connected()  # nobody else will
        return ready

    def check_alive(self) -> None:
        if not self.host.process.is_alive() and not self._from_engine.poll(100):  # its last word may be on its way
            self.host.check_alive()

    def close(self, timeout: float = 10.0) -> None:
        """Ask the engine to stop, then make it; leaves no process, socket or file behind."""
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


def _abandon(process: BaseProcess, sockets: SocketFolder) -> None:
    if process.is_alive():
        process.kill()
        process.join()
    sockets.remove()
