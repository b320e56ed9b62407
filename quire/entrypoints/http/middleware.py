"""ASGI middleware: request tracking, error responses, API keys."""

import asyncio
import functools
import importlib
import inspect
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.http.body import CLIENT_REQUEST_ID, ClientDisconnected
from quire.entrypoints.http.dialect import ErrorBodies
from quire.entrypoints.http.errors import as_api_error
from quire.entrypoints.http.keys import KnownKeys
from quire.entrypoints.http.metrics import HttpMetrics
from quire.entrypoints.http.paths import path_of

logger = logging.getLogger("quire")
access_logger = logging.getLogger("quire.access")

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class RootPath:
    """Serves every path with and without the prefix, whether a proxy strips it or not."""

    def __init__(self, app: ASGIApp, root: str, routes: Sequence[Route] = ()) -> None:
        self.app = app
        self.root = root
        # With --root-path /v1, /v1/models is a path of ours and not the prefix with /models.
        self.own = [route.path_regex for route in routes if route.path.startswith(root + "/")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path.startswith(self.root + "/") and not any(own.match(path) for own in self.own):
            scope = {**scope, "root_path": self.root}
        await self.app(scope, receive, send)


class Tracking:
    """Request ids in and out, counters, and the access log."""

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, routes: Sequence[Route], log: bool, unlogged: frozenset[str]
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = frozenset(route.path for route in routes if not route.param_convertors)
        self.patterns = [(route.path_regex, route.path_format) for route in routes if route.param_convertors]
        self.log = log
        self.unlogged = unlogged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        if CLIENT_REQUEST_ID.fullmatch(given):
            scope["quire.client_request_id"] = given
        request_id = scope["quire.request_id"] = scope.get("quire.client_request_id") or uuid.uuid4().hex
        status = 499  # the client disconnected before the response started
        began = time.perf_counter()

        async def send_start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self.metrics.in_progress += 1
        try:
            await self.app(scope, receive, send_start)
        finally:
            self.metrics.in_progress -= 1
            self._ended(scope, status, time.perf_counter() - began)

    def _ended(self, scope: Scope, status: int, seconds: float) -> None:
        path, method = path_of(scope), scope["method"]
        self.metrics.record(method if method in METHODS else "other", self._handler(path), status, seconds)
        if self.log and path not in self.unlogged:
            client = scope["client"][0] if scope.get("client") else "-"
            raw = scope.get("raw_path", b"").decode("latin-1")  # still percent-encoded, so it cannot break the line
            text = '%s "%s %s" %d %.1f ms %s'
            access_logger.info(text, client, method, raw, status, 1e3 * seconds, scope["quire.request_id"])

    def _handler(self, path: str) -> str:
        """The route, with the names of its parameters: labels of metrics must be bounded."""
        if path in self.paths:
            return path
        return next((name for pattern, name in self.patterns if pattern.match(path)), "other")


class ErrorResponses:
    """Turns exceptions into error responses, in the schema of the path's dialect."""

    def __init__(self, app: ASGIApp, bodies: ErrorBodies, log_stack: bool = False) -> None:
        self.app = app
        self.bodies = bodies
        self.log_stack = log_stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_tracked(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_tracked)
        except ClientDisconnected:
            pass
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also panics of Rust libraries
            api_error = as_api_error(error, scope)
            if self.log_stack and api_error is error:  # other errors have been logged
                logger.error("request %s: %s", scope.get("quire.request_id", ""), error, exc_info=error)
            if not started:
                body = self.bodies.encode(path_of(scope), api_error)
                await api_error.response(body)(scope, receive, send)


class ApiKeys:
    """`Authorization: Bearer KEY` or `x-api-key: KEY` for everything but `open_paths`."""

    def __init__(self, app: ASGIApp, keys: KnownKeys, open_paths: frozenset[str]) -> None:
        self.app = app
        self.open_paths = open_paths
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in self.open_paths:
            headers = Headers(scope=scope)
            scope["quire.key"] = self.keys.check(headers.get("authorization", ""), headers.get("x-api-key", ""))
        await self.app(scope, receive, send)


def import_middleware(path: str) -> Any:
    """`module:Class` or `module.Class`, a class whose first argument is the app; or an async function of a request and
    of what comes next."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise ValueError(f"middleware {path!r} must be written module:Class (--middleware)")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"middleware {path!r} cannot be imported: {error} (--middleware)") from error
    return functools.partial(BaseHTTPMiddleware, dispatch=found) if inspect.iscoroutinefunction(found) else found
