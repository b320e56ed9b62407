"""Running the application: the socket, the signals, and an orderly end."""

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from quire.config.server import ServerConfig
from quire.engine.async_engine import EngineDeadError
from quire.entrypoints.openai.context import ServerContext

logger = logging.getLogger("quire")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
GRACE = 2.0  # seconds for the last bytes of requests that were ended
TICKS_PER_CHECK = 5  # uvicorn's, of a tenth of a second


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before anything slow happens. It does not listen yet, so early clients are refused, not kept
    waiting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"host {config.host!r} is not an address of this machine: {error.strerror} (--host)") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        where = f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{where} is in use; stop what listens there, or choose another port (--port)") from None
        raise ValueError(f"cannot listen on {where}: {error.strerror} (--host, --port)") from None
    return sock


def base_url(sock: socket.socket, config: ServerConfig) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}{config.root_path}"


class Server(uvicorn.Server):
    """uvicorn's, with our order of events at the end. `exit_code` is 1 if the engine died."""

    def __init__(self, app: Starlette, config: ServerConfig, ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile_password=config.ssl_keyfile_password,
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=int(config.shutdown_timeout + GRACE + 1),
            )
        )
        self.context: ServerContext = app.state.context
        self.drain_seconds = config.shutdown_timeout
        self.ready = ready
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.ready is not None:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_CHECK == 0 and not self.should_exit:
            try:
                await self.context.engine.check_health()
            except EngineDeadError as error:
                logger.error("the engine has died: %s", error)
                self.exit_code, self.should_exit = 1, True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.context.draining = True
        open_requests = len(self.context.jobs)
        if open_requests:
            logger.info("shutting down; %d requests have %g s to end", open_requests, self.drain_seconds)
        asyncio.get_running_loop().call_later(self.drain_seconds, self.context.abort_all)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second leaves at once."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn would raise the signal again afterwards, which ends the process before its engine is shut down.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def announce(url: str, context: ServerContext) -> None:
    name = context.model_names[0]
    logger.info("serving %s at %s/v1", name, url)
    message = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    logger.info("try: curl %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'", url, message)
