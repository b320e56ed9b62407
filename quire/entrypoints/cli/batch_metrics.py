"""`quire run-batch --enable-metrics`: /metrics over HTTP while the batch runs."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/metrics"


class MetricsServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # Ctrl-C ends the batch, and the batch ends the server


class OnlyMetrics:
    """The server's application with one path; requests are run by the batch alone."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["path"] == PATH:
            await self.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": f"only {PATH} is here\n".encode()})


@contextlib.asynccontextmanager
async def serving_metrics(app: "ASGIApp", sock: socket.socket | None) -> AsyncIterator[None]:
    """Serves on the socket until the end of the block; without a socket nothing."""
    if sock is None:
        yield
        return
    config = uvicorn.Config(
        OnlyMetrics(app), lifespan="off", log_config=None, log_level="warning", access_log=False, server_header=False
    )
    server = MetricsServer(config)
    task = asyncio.create_task(server.serve([sock]))
    host, port = sock.getsockname()[:2]
    print(f"quire: metrics at http://{f'[{host}]' if ':' in host else host}:{port}{PATH}", file=sys.stderr)
    try:
        yield
    finally:
        server.should_exit = True
        await task
