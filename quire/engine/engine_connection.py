"""Starting an engine process, and the wire to it."""

import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from quire.config import EngineConfig
from quire.core.engine_process import engine_process_main
from quire.engine.async_engine import EngineDeadError
from quire.messages.protocol import Codec, Dead, FromEngine, Hello, Ready, Shutdown


class EngineConnection:
    """One front end's side. `send` belongs to one thread and `receive` to one (possibly another) thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))
        address, output_address = (f"ipc://{self._folder}/{name}" for name in ("in", "out"))
        self._context = zmq.Context()
        self._codec_out, self._codec_in = Codec(FromEngine), Codec(FromEngine)
        self._to_engine = self._socket(zmq.DEALER)
        self._from_engine = self._socket(zmq.PULL)
        self._from_engine.bind(output_address)
        # A fresh interpreter: a fork would take along threads' locks and whatever else this process holds.
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_process_main, args=(config, address), name="quire-engine"
        )
        self.process.start()
        self._to_engine.connect(address)
        self.send(Hello(output_address))

    def wait_ready(self) -> Ready:
        """Until the model is loaded; EngineDeadError, with the cause, if that fails."""
        while True:
            message = self.receive(timeout=0.1)
            if isinstance(message, Ready):
                return message
            if isinstance(message, Dead):
                raise EngineDeadError(message.cause)
            self.check_alive()

    def send(self, message: Any) -> None:
        self._to_engine.send_multipart(self._codec_out.encode(message), copy=False)

    def receive(self, timeout: float) -> Any | None:
        """The next message, or None after so many seconds."""
        if not self._from_engine.poll(round(timeout * 1000)):
            return None
        return self._codec_in.decode(self._from_engine.recv_multipart())

    def check_alive(self) -> None:
        if not self.process.is_alive() and not self._from_engine.poll(0):
            raise EngineDeadError(f"the engine process ended with exit code {self.process.exitcode}")

    def close(self, timeout: float = 10.0) -> None:
        """Ask the engine to stop, then make it; leaves no process, socket or file behind."""
        if self.process.is_alive():
            self.send(Shutdown())
        deadline = time.monotonic() + timeout
        for end in (None, self.process.terminate, self.process.kill):
            if end is not None and self.process.is_alive():
                end()
            self.process.join(max(0.1, deadline - time.monotonic()) if end is None else 2.0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket
