"""The client of `quire bench serve` and `quire bench soak`: HTTP and server-sent events on a bare asyncio protocol.

A connection per request, parsed by httptools. An event costs a few microseconds, so that the client is not the
bottleneck; several client processes share the requests if one is not enough.
"""

import asyncio
import contextlib
import gc
import ssl
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None

    @property
    def new_text(self) -> str:
        return (self.delta.content if self.delta is not None else self.text) or ""


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """The fields used of an event of either endpoint, or of a whole response."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


class Pooled(msgspec.Struct):
    """The field used of a response that pools."""

    usage: Usage | None = None


decode_event = msgspec.json.Decoder(Event).decode
decode_usage = msgspec.json.Decoder(Pooled).decode


@dataclass
class Request:
    index: int
    body: dict[str, Any]
    due: float = 0.0  # seconds after the start
    request_id: str | None = None  # sent as X-Request-Id


@dataclass
class Record:
    """The result of a request. Times are of `time.perf_counter`, which all processes of a machine share."""

    index: int
    due: float | None = None  # None: as soon as max_concurrency allowed
    sent: float = 0.0
    ended: float = 0.0
    events: array = field(default_factory=lambda: array("d"))  # arrival times of events with tokens
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "usage"  # source of output_tokens: usage, token ids, or events if a server sends neither
    error: str | None = None  # its kind, in a few words
    texts: dict[int, list[str]] = field(default_factory=dict)  # by choice, with keep_text


@dataclass
class Run:
    """Start time and records of a run."""

    start: float
    records: list[Record]


@dataclass(frozen=True)
class Target:
    """The server's address and what all requests share."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0  # seconds for a whole request
    headers: tuple[tuple[str, str], ...] = ()  # more of them; they replace our own
    verify: bool = True  # the server's certificate

    def address(self) -> tuple[str, int, ssl.SSLContext | None]:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not an address; write http://HOST:PORT (--base-url)")
        if parts.scheme == "http":
            return parts.hostname, parts.port or 80, None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return parts.hostname, parts.port or 443, context

    def message(self, method: str, path: str, body: Any = None, request_id: str | None = None) -> bytes:
        """A whole HTTP request."""
        parts = urlsplit(self.url)
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Host": parts.netloc, "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if data:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in self.headers:
            headers = {known: own for known, own in headers.items() if known.lower() != name.lower()} | {name: value}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + data


class Exchange(asyncio.Protocol):
    """One request and its response. `on_body` is called with each part of the body; `done` is set at the end."""

    def __init__(self, message: bytes, on_body: Callable[[bytes], None]) -> None:
        self.message = message
        self.on_body = on_body  # called by the parser
        self.status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        transport.write(self.message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self._end(ValueError(f"the response cannot be parsed: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the server closed the connection"))

    def disconnect(self) -> None:
        """Close the connection at once."""
        if not self.done.done():
            self.done.cancel()
        elif not self.done.cancelled():
            self.done.exception()  # mark as retrieved
        if self.transport is not None:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if self.transport is not None:
            self.transport.close()


class EventReader:
    """Splits a body into server-sent events and records their arrival times."""

    def __init__(self, record: Record, keep_text: bool = False) -> None:
        self.record = record
        self.keep_text = keep_text
        self.finished = False
        self.error: dict[str, Any] | None = None
        self._rest = b""
        self._num_token_ids = 0
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        parts = (self._rest + data if self._rest else data).split(b"\n\n")
        self._rest = parts.pop()
        for part in parts:
            if not part.startswith(b"data: "):
                continue  # a keep-alive comment
            if part.endswith(DONE) and len(part) < 16:
                self.finished = True
            else:
                self._process(decode_event(part[6:]), now)

    def _process(self, event: Event, now: float) -> None:
        if event.error is not None:
            self.error = event.error
        if event.usage is not None:
            self._usage = event.usage
        has_tokens = False
        for choice in event.choices:
            text = choice.new_text
            if choice.token_ids:
                self._num_token_ids += len(choice.token_ids)
            has_tokens = has_tokens or bool(text or choice.token_ids)
            if self.keep_text and text:
                self.record.texts.setdefault(choice.index, []).append(text)
        if has_tokens:
            self.record.events.append(now)

    def close(self) -> None:
        """Set the number of tokens, from the most exact source available."""
        record = self.record
        if self._usage is not None:
            record.prompt_tokens = self._usage.prompt_tokens
            record.output_tokens = self._usage.completion_tokens
        elif self._num_token_ids:
            record.output_tokens, record.counted_by = self._num_token_ids, "token ids"
        else:
            record.output_tokens, record.counted_by = len(record.events), "events"


class BodyReader:
    """A response that comes as a whole, of requests that pool: its end is its one event."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.finished = False
        self.error: dict[str, Any] | None = None
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self) -> None:
        if not self._parts:
            return
        try:
            whole = decode_usage(b"".join(self._parts))
        except msgspec.MsgspecError:
            return  # cut off
        self.finished = True
        self.record.events.append(self.record.ended)
        if whole.usage is not None:
            self.record.prompt_tokens = whole.usage.prompt_tokens


class Client:
    """Sends requests to one path of a server, each when it is due, at most `max_concurrency` at a time. Responses are
    events if it `streams`, else whole."""

    def __init__(
        self,
        target: Target,
        path: str,
        max_concurrency: int | None = None,
        keep_text: bool = False,
        streams: bool = True,
    ) -> None:
        self.target = target
        self.path = path
        self.host, self.port, self.tls = target.address()
        self.slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self.keep_text = keep_text
        self.streams = streams

    async def run(self, requests: list[Request], when: Callable[[], float]) -> Run:
        """`when` returns the start time; called once everything is prepared."""
        messages = [self.target.message("POST", self.path, one.body, one.request_id) for one in requests]
        gc.collect()
        gc.freeze()  # no collection of long-lived objects during the run
        start = when()
        tasks = []
        for request, message in sorted(zip(requests, messages, strict=True), key=lambda pair: pair[0].due):
            wait = start + request.due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            due = start + request.due if self.slots is None else None
            tasks.append(asyncio.create_task(self._one(request.index, message, due)))
        return Run(start, await asyncio.gather(*tasks))

    async def _one(self, index: int, message: bytes, due: float | None) -> Record:
        async with self.slots or contextlib.nullcontext():
            return await self.send(index, message, due)

    async def send(self, index: int, message: bytes, due: float | None = None) -> Record:
        record = Record(index, due, sent=time.perf_counter())
        reader = EventReader(record, self.keep_text) if self.streams else BodyReader(record)
        refusal: list[bytes] = []

        def on_body(data: bytes) -> None:
            if exchange.status == 200:
                reader.feed(data)
            else:
                refusal.append(data)

        exchange = Exchange(message, on_body)
        try:
            async with asyncio.timeout(self.target.timeout):
                await asyncio.get_running_loop().create_connection(lambda: exchange, self.host, self.port, ssl=self.tls)
                await exchange.done
        except TimeoutError:
            record.error = "timeout"
        except (OSError, ValueError) as error:
            record.error = type(error).__name__ if exchange.transport else f"no connection: {type(error).__name__}"
        finally:
            exchange.disconnect()
        record.ended = time.perf_counter()
        reader.close()
        record.error = record.error or self._failure(exchange.status, reader, b"".join(refusal))
        return record

    @staticmethod
    def _failure(status: int, reader: EventReader | BodyReader, refusal: bytes) -> str | None:
        if status != 200:
            return f"HTTP {status} {error_code(refusal)}".rstrip()
        if reader.error is not None:
            return f"error event: {reader.error.get('code') or reader.error.get('type') or 'unnamed'}"
        return None if reader.finished else "the response ended early"


def error_code(body: bytes) -> str:
    try:
        error = decode_event(body).error or {}
    except msgspec.MsgspecError:
        return ""
    return str(error.get("code") or error.get("type") or "")


async def fetch(target: Target, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """One request: status and body. Raises OSError if there is no response."""
    parts: list[bytes] = []
    exchange = Exchange(target.message(method, path, body), parts.append)
    host, port, tls = target.address()
    async with asyncio.timeout(target.timeout):
        await asyncio.get_running_loop().create_connection(lambda: exchange, host, port, ssl=tls)
        await exchange.done
    return exchange.status, b"".join(parts)
