"""A client for OpenAI-compatible servers, on the standard library's HTTP alone."""

import argparse
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire import __version__
from quire.config.environment import OPENAI_API_KEY, QUIRE_API_KEY
from quire.config.flags import number

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = (QUIRE_API_KEY, OPENAI_API_KEY)
KEY_SOURCES = " or ".join(variable.name for variable in KEY_VARIABLES)
CONNECT_SECONDS = 10.0
READ_TIMEOUT = 600.0
MAX_LINE = 64 << 20  # bytes of one event
SHOWN = 500  # characters of an unexpected response body


class ServerError(ValueError):
    """A refused or failed request; the message says what to do."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def fatal(self) -> bool:
        """Any other request would fail too."""
        return self.status in (401, 403)


class Unreachable(ServerError):
    fatal = True


@dataclass
class HttpResponse:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


def add_client_flags(parser: argparse.ArgumentParser, default_url: str | None = DEFAULT_URL) -> None:
    group = parser.add_argument_group("Server")
    shown = f" (default: {default_url})" if default_url else f", such as {DEFAULT_URL}"
    group.add_argument("--url", metavar="URL", default=default_url, help=f"an OpenAI-compatible server{shown}")
    group.add_argument("--model-name", metavar="NAME", help="the model to use (default: the first that it lists)")
    group.add_argument("--api-key", metavar="KEY", help=f"(default: from {KEY_SOURCES})")
    group.add_argument(
        "--timeout",
        type=number,
        metavar="SECONDS",
        default=READ_TIMEOUT,
        help=f"fail when the server sends nothing for this long (default: {READ_TIMEOUT:g})",
    )


def client_from(args: argparse.Namespace) -> "ApiClient":
    if not args.timeout > 0:
        raise ValueError(f"timeout is {args.timeout:g}; it must be above 0 (--timeout)")
    return ApiClient(args.url, args.api_key or key_from(), args.timeout)


def key_from(environ: Mapping[str, str] | None = None) -> str | None:
    """The server's variable may hold several keys; use the first."""
    return next((key for variable in KEY_VARIABLES for key in variable.get(environ)), None)


class ApiClient:
    """Requests may be made from several threads; each has its own connection."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = READ_TIMEOUT) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {url!r}; it must look like {DEFAULT_URL} (--url)")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("the url may hold a host, a port and a path only; a key goes into --api-key (--url)")
        try:
            self.host, self.port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"url is {url!r}: {error} (--url)") from None
        self.tls = parts.scheme == "https"
        self.path = parts.path.rstrip("/") or "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.timeout = timeout
        self.headers = {"Content-Type": "application/json", "User-Agent": f"quire/{__version__}"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError("the API key holds characters that no key can have (--api-key)")
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def model_names(self) -> list[str]:
        result = self.request("GET", "/models")
        if result.status != 200:
            raise self.refusal(result)
        try:
            return [str(card["id"]) for card in msgspec.json.decode(result.body)["data"]]
        except (ValueError, TypeError, LookupError):
            raise self._not_openai(result) from None

    def first_model(self) -> str:
        names = self.model_names()
        if not names:
            raise ServerError(f"{self.url} lists no model; name one (--model-name)")
        return names[0]

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> HttpResponse:
        """The whole response, whatever its status."""
        with self._exchange(method, path, body, headers) as response, self._network_errors():
            return _result(response, response.read())

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed response. Leaving early closes the connection, which aborts the request."""
        with self._exchange("POST", path, msgspec.json.encode({**body, "stream": True}), {}) as response:
            kind = response.headers.get_content_type()
            if response.status == 200 and kind == "text/event-stream":
                yield self._events(response)
                return
            with self._network_errors():
                result = _result(response, response.read())
            if response.status != 200:
                raise self.refusal(result)
            yield iter([self._event(result.body, result)])  # the server does not stream

    def close(self) -> None:
        """Abort the requests that other threads are waiting for, and refuse new ones."""
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        sock = connection.sock
        with self._lock:
            self._sockets.add(sock)
            closed = self._closed
        response = None
        try:
            with self._network_errors():
                if closed:
                    raise ConnectionAbortedError("the client is closed")
                connection.request(method, self.path + path, body, self.headers | dict(headers))
                response = connection.getresponse()
            yield response
        finally:
            with self._lock:
                self._sockets.discard(sock)
            if response is not None:
                response.close()
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self.tls:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=CONNECT_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Unreachable(f"cannot reach {self.url}: {_connect_problem(error)}") from error
        connection.sock.settimeout(self.timeout)
        return connection

    @contextmanager
    def _network_errors(self) -> Iterator[None]:
        """Turns network errors into ServerError; wrap only network calls."""
        try:
            yield
        except TimeoutError as error:
            raise ServerError(f"{self.url} sent nothing for {self.timeout:g} seconds (--timeout)") from error
        except http.client.RemoteDisconnected as error:
            hint = "" if self.tls else "; if it uses TLS, write https:// in --url"
            raise ServerError(f"{self.url} closed the connection without a response{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from error

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        finished = False
        with self._network_errors():
            for data in server_sent_events(response):
                if data == b"[DONE]":
                    return
                event = self._event(data, _result(response, data))
                finished = finished or any(choice.get("finish_reason") for choice in event["choices"])
                yield event
        if not finished:
            raise ServerError(f"{self.url} ended the stream early; see the server's log")

    def _event(self, data: bytes, result: HttpResponse) -> dict[str, Any]:
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except ValueError:
            raise self._not_openai(result) from None
        if "error" in event:
            raise ServerError(error_message(data) or "the server failed without a message")
        if not isinstance(event.setdefault("choices", []), list):
            raise self._not_openai(result)
        return event

    def refusal(self, result: HttpResponse) -> ServerError:
        """The error for a response other than 200, with a hint for the user."""
        message = error_message(result.body)
        seconds = result.headers.get("retry-after", "")
        retry = float(seconds) if seconds.isdecimal() else None
        if result.status in (401, 403):
            text = f"{self.url} requires a valid API key: {message or result.status}"
            return ServerError(f"{text}; give it with --api-key or in {KEY_SOURCES}", result.status)
        if 300 <= result.status < 400 and result.headers.get("location"):
            where = result.headers["location"]
            return ServerError(f"{self.url} has moved to {where}; give that address (--url)", result.status)
        if message is None:
            return self._not_openai(result)
        if result.status == 404:
            is_model = "the model" in message.lower()  # OpenAI's and vLLM's wording too
            hint = "see what it has with GET /v1/models (--model-name)" if is_model else "does --url end in /v1?"
            message = f"{message}; {hint}"
        elif result.status in (429, 503):
            message += f"; try again in {retry:g} s" if retry is not None else "; try again later"
        return ServerError(message, result.status, retry)

    def _not_openai(self, result: HttpResponse) -> ServerError:
        start = result.body[:SHOWN].decode("utf-8", "replace").split("\n")[0].strip()
        said = f"{result.status} {start!r}" if start else f"{result.status} and an empty body"
        message = f"{self.url} does not respond as an OpenAI-compatible server: {said}; does --url end in /v1?"
        return ServerError(message, result.status)


def _result(response: http.client.HTTPResponse, body: bytes) -> HttpResponse:
    return HttpResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def server_sent_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event; data lines are joined, comments skipped."""
    data: list[bytes] = []
    while line := response.readline(MAX_LINE):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data.clear()
    if data:
        yield b"\n".join(data)


def error_message(body: bytes) -> str | None:
    """OpenAI puts it under `error`, older servers at the top level, web frameworks under `detail`."""
    try:
        given = msgspec.json.decode(body)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    error = given.get("error", given)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail"))
    return str(error) if error else None


def _connect_problem(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name its authority's file in SSL_CERT_FILE"
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error}; is it an http:// server rather than https://?"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} seconds; check the address (--url)"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; check the host's name (--url)"
    return f"{error.strerror or error}; start a server with quire serve, or give its address (--url)"
