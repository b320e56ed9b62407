"""Runs the application: socket, signals, graceful shutdown."""

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
import uvicorn.config
from starlette.applications import Starlette

from quire.config.server import ServerConfig
from quire.engine.async_engine import EngineDeadError, EngineStalledError
from quire.entrypoints.http.connection import connection_factory
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import dialects
from quire.entrypoints.http.middleware import access_logger

if TYPE_CHECKING:
    from quire.entrypoints.grpc.server import GrpcServer

logger = logging.getLogger("quire")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2048
GRACE = 2.0  # seconds to flush the responses of aborted requests
TICKS_PER_CHECK = 5  # uvicorn ticks every 0.1 s


def bind(config: ServerConfig) -> socket.socket:
    """Reserve the port before the slow start. It does not listen yet, so early clients are refused instead of
    waiting."""
    if config.uds is not None:
        return _bind_unix(config.uds)
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


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            try:
                sock.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()  # of a server that has ended
            else:
                raise ValueError(f"{path} is in use; stop what listens there, or choose another path (--uds)")
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ValueError(f"cannot listen on {path}: {error.strerror or error} (--uds)") from None
    except ValueError:
        sock.close()
        raise
    return sock


def base_url(sock: socket.socket, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}{config.root_path}"


class Server(uvicorn.Server):
    """uvicorn's server, with draining at shutdown. `exit_code` is 1 if the engine died; `failure` is the cause."""

    def __init__(
        self,
        app: Starlette,
        config: ServerConfig,
        ready: Callable[[], None] | None = None,
        *,
        supervised: bool = False,
    ) -> None:
        """`ready` is called in the event loop when the server listens. A supervised server leaves signals, and
        logging of failures, to its supervisor."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=connection_factory(config),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=config.uvicorn_log_level or "warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile_password=config.ssl_keyfile_password,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                ssl_ciphers=config.ssl_ciphers or "TLSv1",
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=int(config.shutdown_timeout + GRACE + 1),
            )
        )
        if config.uvicorn_log_level is not None:
            access_logger.setLevel(uvicorn.config.LOG_LEVELS[config.uvicorn_log_level])
        self.context: ServerContext = app.state.context
        self._certificate = Certificate(self.config) if config.enable_ssl_refresh and config.ssl_certfile else None
        self.drain_seconds = config.shutdown_timeout
        self.ready = ready
        self.supervised = supervised
        self.grpc: GrpcServer | None = None
        self.exit_code = 0
        self.failure: str | None = None
        self.signal = 0  # the second one, if that ended the server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.context.adapters.load_all()
        await super().startup(sockets)
        if self.started and self.context.config.grpc_port is not None:
            from quire.entrypoints.grpc.server import GrpcServer  # an extra

            self.grpc = GrpcServer(self.context)
            await self.grpc.start()
        if self.started and self.ready is not None:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        self.context.report_load()
        if counter % TICKS_PER_CHECK == 0 and self._certificate is not None:
            self._certificate.refresh()
        if counter % TICKS_PER_CHECK == 0 and not self.should_exit:
            try:
                await self.context.engine.check_health()
            except EngineDeadError as error:
                self.fail(str(error))
            except EngineStalledError:
                pass  # it may recover; /health reports it until then
        return await super().on_tick(counter)

    def fail(self, engine_cause: str | None) -> None:
        """A process of the server died: end every request with an error, then exit."""
        if engine_cause is not None:
            self.failure = f"the engine has died: {engine_cause}"
            if not self.supervised:
                logger.error(self.failure)
        self.exit_code, self.should_exit = 1, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.context.draining = True
        loop, seconds = asyncio.get_running_loop(), 0.0 if self.exit_code else self.drain_seconds
        open_requests = len(self.context.jobs)
        if open_requests and not self.exit_code:
            logger.info("shutting down; %d requests have %g s to end", open_requests, seconds)
        # A client that does not read its error response must not delay the exit.
        end = functools.partial(self.context.abort_all, engine_died=self.failure is not None)
        timers = [loop.call_later(seconds, end), loop.call_later(seconds + GRACE, self._force)]
        stopping = asyncio.create_task(self.grpc.stop(seconds)) if self.grpc is not None else None
        await super().shutdown(sockets)
        while stopping is not None and not stopping.done() and not self.force_exit:
            await asyncio.wait({stopping}, timeout=0.1)
        if stopping is not None and self.grpc is not None:
            await self.grpc.stop(0)
            await stopping
        for timer in timers:
            timer.cancel()
        if self.context.tracer is not None and not self.force_exit:
            await asyncio.to_thread(self.context.tracer.close)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once."""
        if self.should_exit:
            self.force_exit, self.signal = True, sig
        self.should_exit = True

    def _force(self) -> None:
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn re-raises the signal afterwards, which would kill the process before its engine is shut down.
        if self.supervised or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled_signals()}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def handled_signals() -> list[signal.Signals]:
    """Without signals that are ignored at start, as SIGHUP is under `nohup`."""
    return [sig for sig in SIGNALS if signal.getsignal(sig) is not signal.SIG_IGN]


class Certificate:
    """Loads the certificate's files again when they have changed. Connections that exist keep the old one."""

    def __init__(self, config: uvicorn.Config) -> None:
        self.config = config
        self._files = [Path(str(name)) for name in (config.ssl_certfile, config.ssl_keyfile)]
        self._loaded = self._state()

    def _state(self) -> list[tuple[int, int]]:
        return [(stat.st_mtime_ns, stat.st_ino) for stat in (file.stat() for file in self._files)]

    def refresh(self) -> None:
        try:
            state = self._state()
            if state == self._loaded or self.config.ssl is None:
                return
            certificate, key = self._files
            self.config.ssl.load_cert_chain(certificate, key, self.config.ssl_keyfile_password)
        except (OSError, ValueError) as error:  # between two writes, the files do not fit
            logger.debug("the certificate cannot be loaded yet: %s", error)
        else:
            self._loaded = state
            logger.info("the TLS certificate was loaded again")


def announce(url: str, name: str, kind: str, config: ServerConfig | None = None, task: str | None = None) -> None:
    """`kind`: what the server makes of the model, in words. `task`: of a model that pools."""
    config = config or ServerConfig()
    logger.info("serving %s at %s", name, url)
    logger.info(kind)
    if config.tokens_only or url.startswith("unix:"):
        return
    for dialect in dialects():
        if task is None and dialect.example is not None:
            logger.info("try: %s", dialect.example(url, name))
        elif task is not None and dialect.pooling_example is not None:
            logger.info("try: %s", dialect.pooling_example(url, name, task))
    if not config.disable_page:
        logger.info("or open %s/ in a browser", url)
        if config.open:  # in a thread: a browser in the terminal would hold up the server
            threading.Thread(target=webbrowser.open, args=(url + "/",), daemon=True).start()
