"""A client's connection: limits that apply before any authentication."""

import asyncio
import functools
import json
import logging
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.config.server import ServerConfig

logger = logging.getLogger("quire")

MAX_CONNECTIONS = 8192
WARN_SECONDS = 60.0
MAX_PIPELINED = 16  # requests queued behind the one being processed
MAX_READ = 1 << 18  # bytes of one socket read
MAX_DISCARDED = 1 << 16  # body bytes received after the response was sent
FREE_CHUNKS, CHUNK_BYTES = 4096, 64  # chunks allowed per body: FREE_CHUNKS, plus one per CHUNK_BYTES received
LAST_SECONDS = 1.0  # to flush a connection at shutdown


@dataclass(frozen=True)
class ConnectionLimits:
    connections: int
    per_address: int
    header_bytes: int
    header_count: int
    url_bytes: int
    header_seconds: float
    write_seconds: float

    @classmethod
    def of(cls, config: ServerConfig) -> "ConnectionLimits":
        descriptors = _raise_descriptor_limit()
        connections = config.max_connections or min(MAX_CONNECTIONS, 3 * descriptors // 4)
        if connections >= descriptors:
            raise ValueError(
                f"max_connections is {connections}, but this process may open {descriptors} files; raise that "
                "(ulimit -n) or lower it (--max-connections)"
            )
        return cls(
            connections=connections,
            per_address=config.max_connections_per_address or max(1, 3 * connections // 4),
            header_bytes=config.h11_max_incomplete_event_size,
            header_count=config.h11_max_header_count,
            url_bytes=config.max_url_bytes,
            header_seconds=config.timeout_request_headers,
            write_seconds=config.timeout_response_write,
        )


def _raise_descriptor_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit: every connection needs a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, 4 * MAX_CONNECTIONS)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return hard


@dataclass
class OpenConnections:
    """Connection counts of one server process."""

    by_address: "Counter[str]" = field(default_factory=Counter)
    warned_at: float = -WARN_SECONDS

    def warn(self, message: str, now: float) -> None:
        """At most once a minute: a client over the limit keeps reconnecting."""
        if now - self.warned_at >= WARN_SECONDS:
            self.warned_at = now
            logger.warning("connections are refused: %s", message)


class _Refused(Exception):
    """Stops parsing: the client gets this status and the connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with the limits that it lacks."""

    def __init__(self, *args: Any, limits: ConnectionLimits, opened: OpenConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.opened = opened
        self._address = ""
        self._refused: _Refused | None = None
        self._header_bytes = 0  # of this request
        self._unparsed_bytes = 0  # since the parser's last callback: it buffers incomplete elements
        self._in_headers = True
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._active_cycles: list[RequestResponseCycle] = []  # oldest first
        self._num_chunks = 0  # of this body, as the next two
        self._body_bytes = 0
        self._discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self.opened.by_address[self._address] += 1
        if len(self.connections) > self.limits.connections:
            message = f"too many connections; at most {self.limits.connections} (--max-connections)"
        elif self._address and self.opened.by_address[self._address] > self.limits.per_address:
            most = f"at most {self.limits.per_address} (--max-connections-per-address)"
            message = f"too many connections from {self._address}; {most}"
        else:
            self._expect_request()
            return
        self.opened.warn(message, self.loop.time())
        self._refuse(_Refused(503, message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.opened.by_address[self._address] -= 1
        if not self.opened.by_address[self._address]:
            del self.opened.by_address[self._address]
        # uvicorn signals the disconnect to the newest request only.
        for cycle in self._active_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        if self._in_headers and self._request_timer is None:  # the first bytes of the next request
            self._expect_request()
        self._unparsed_bytes += len(data)
        if self._unparsed_bytes > self.limits.header_bytes + MAX_READ:
            self._refuse(self._too_large())
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are not supported: handled as a normal request
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, _Refused) else _Refused(400, "this is not an HTTP request"))

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._num_chunks = self._body_bytes = self._discarded = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.url_bytes:
            raise _Refused(414, f"the URL is longer than {self.limits.url_bytes} bytes (--max-url-bytes)")
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.limits.header_count:
            most = self.limits.header_count
            raise _Refused(431, f"the request has more than {most} headers (--h11-max-header-count)")
        self._count_header(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._cancel_request_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(503, f"more than {MAX_PIPELINED} requests are pipelined")
        super().on_headers_complete()
        self._active_cycles = [cycle for cycle in self._active_cycles if not cycle.response_complete] + [self.cycle]
        if len(self._active_cycles) > 1:
            # uvicorn pauses reading until the previous response completes, and would miss a disconnect.
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._body_bytes // CHUNK_BYTES:
            raise _Refused(400, f"the body's chunks are smaller than {CHUNK_BYTES} bytes; send larger ones")

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED:
                raise _Refused(413, "the response was sent before the request body arrived")
        if len(self._active_cycles) > 1 and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            raise _Refused(503, "a pipelined request is too large; wait for the previous response")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._unparsed_bytes = 0
        self._cancel_request_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close(self.limits.write_seconds)
        elif not self._in_headers:
            # The response was sent before the body arrived: give the client a moment to notice and stop.
            self._request_timer = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # Timeouts

    def _expect_request(self) -> None:
        self._cancel_request_timer()
        self._request_timer = self.loop.call_later(self.limits.header_seconds, self._headers_timed_out)

    def _headers_timed_out(self) -> None:
        seconds = self.limits.header_seconds
        self._refuse(_Refused(408, f"no request arrived within {seconds:g} seconds (--timeout-request-headers)"))

    def timeout_keep_alive_handler(self) -> None:
        self._close(self.limits.write_seconds)

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close(LAST_SECONDS)

    def _close(self, seconds: float) -> None:
        """transport.close() waits without limit for the client to read what was written; abort after `seconds`."""
        self.transport.close()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._close_timer = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_write_timer()
        super().resume_writing()

    def _cancel_timers(self) -> None:
        self._cancel_request_timer()
        self._cancel_write_timer()

    def _cancel_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Refusals

    def _count_header(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += size
        if self._header_bytes > self.limits.header_bytes:
            raise self._too_large()

    def _too_large(self) -> _Refused:
        most = self.limits.header_bytes
        return _Refused(431, f"request line and headers have more than {most} bytes (--h11-max-incomplete-event-size)")

    def _refuse(self, refused: _Refused) -> None:
        """Send an error response and close; only close if another response is being written."""
        self._refused = refused
        self._cancel_timers()
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._active_cycles):
            kind = "invalid_request_error" if refused.status < 500 else "server_error"
            error = {"message": str(refused), "type": kind, "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
            more = b"retry-after: 1\r\n" if refused.status == 503 else b""
            self.transport.write(STATUS_LINE[refused.status] + head + more + b"\r\n" + body)
        self._close(self.timeout_keep_alive)


def connection_factory(config: ServerConfig) -> Callable[..., Connection]:
    """The protocol factory for uvicorn."""
    return functools.partial(Connection, limits=ConnectionLimits.of(config), opened=OpenConnections())
