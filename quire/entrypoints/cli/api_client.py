"""An OpenAI-compatible server as the command line talks to it, with nothing but the standard library's HTTP."""

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
SILENT_SECONDS = 600.0
MAX_LINE = 64 << 20  # bytes of one event
SHOWN = 500  # characters of an answer that is not understood


class ServerError(ValueError):
    """What a server refused, or how it failed; the message says what to do."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def fatal(self) -> bool:
        """No other request would fare better."""
        return self.status in (401, 403)


class Unreachable(ServerError):
    fatal = True


@dataclass
class HttpAnswer:
    status: int
    headers: Mapping[str, str]  # by names in lower case
    body: bytes


def add_client_flags(parser: argparse.ArgumentParser, default_url: str | None = DEFAULT_URL) -> None:
    group = parser.add_argument_group("Server")
    shown = f" (default: {default_url})" if default_url else f", such as {DEFAULT_URL}"
    group.add_argument("--url", metavar="URL", default=default_url, help=f"an OpenAI-compatible server{shown}")
    group.add_argument("--model-name", metavar="NAME", help="the model to ask (default: the first that it lists)")
    group.add_argument("--api-key", metavar="KEY", help=f"(default: from {KEY_SOURCES})")
    group.add_argument(
        "--timeout",
        type=number,
        metavar="SECONDS",
        default=SILENT_SECONDS,
        help=f"give up when the server says nothing for so long (default: {SILENT_SECONDS:g})",
    )


def client_from(args: argparse.Namespace) -> "ApiClient":
    if not args.timeout > 0:
        raise ValueError(f"timeout is {args.timeout:g}; it must be above 0 (--timeout)")
    return ApiClient(args.url, args.api_key or key_from(), args.timeout)


def key_from(environ: Mapping[str, str] | None = None) -> str | None:
    """A server's own variable may hold several keys; any of them will do."""
    return next((key for variable in KEY_VARIABLES for key in variable.get(environ)), None)


class ApiClient:
    """Requests may be made from several threads; each has its own connection."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = SILENT_SECONDS) -> None:
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
        answer = self.request("GET", "/models")
        if answer.status != 200:
            raise self.refusal(answer)
        try:
            return [str(card["id"]) for card in msgspec.json.decode(answer.body)["data"]]
        except (ValueError, TypeError, LookupError):
            raise self._not_openai(answer) from None

    def first_model(self) -> str:
        names = self.model_names()
        if not names:
            raise ServerError(f"{self.url} lists no model; name one (--model-name)")
        return names[0]

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> HttpAnswer:
        """The whole answer, whatever its status."""
        with self._exchange(method, path, body, headers) as response, self._explained():
            return _answer(response, response.read())

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of an answer as they come. Leaving early closes the connection, which ends it in the server."""
        with self._exchange("POST", path, msgspec.json.encode({**body, "stream": True}), {}) as response:
            kind = response.headers.get_content_type()
            if response.status == 200 and kind == "text/event-stream":
                yield self._events(response)
                return
            with self._explained():
                answer = _answer(response, response.read())
            if response.status != 200:
                raise self.refusal(answer)
            yield iter([self._event(answer.body, answer)])  # a server that cannot stream

    def close(self) -> None:
        """End all requests that other threads are waiting for, and allow no more."""
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
            with self._explained():
                if closed:
                    raise ConnectionAbortedError("it was given up")
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
    def _explained(self) -> Iterator[None]:
        """Around what the network can spoil, and nothing else."""
        try:
            yield
        except TimeoutError as error:
            raise ServerError(f"{self.url} said nothing for {self.timeout:g} seconds (--timeout)") from error
        except http.client.RemoteDisconnected as error:
            hint = "" if self.tls else "; if it speaks TLS, write https:// in --url"
            raise ServerError(f"{self.url} closed the connection without an answer{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from error

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        finished = False
        with self._explained():
            for data in server_sent_events(response):
                if data == b"[DONE]":
                    return
                event = self._event(data, _answer(response, data))
                finished = finished or any(choice.get("finish_reason") for choice in event["choices"])
                yield event
        if not finished:
            raise ServerError(f"{self.url} ended the answer in its middle; the server's log may say why")

    def _event(self, data: bytes, answer: HttpAnswer) -> dict[str, Any]:
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except ValueError:
            raise self._not_openai(answer) from None
        if "error" in event:
            raise ServerError(error_message(data) or "the server failed without saying why")
        if not isinstance(event.setdefault("choices", []), list):
            raise self._not_openai(answer)
        return event

    def refusal(self, answer: HttpAnswer) -> ServerError:
        """What an answer other than 200 means for the person at the command line."""
        message = error_message(answer.body)
        seconds = answer.headers.get("retry-after", "")
        retry = float(seconds) if seconds.isdecimal() else None
        if answer.status in (401, 403):
            text = f"{self.url} wants an API key that it knows: {message or answer.status}"
            return ServerError(f"{text}; give it with --api-key or in {KEY_SOURCES}", answer.status)
        if 300 <= answer.status < 400 and answer.headers.get("location"):
            where = answer.headers["location"]
            return ServerError(f"{self.url} has moved to {where}; give that address (--url)", answer.status)
        if message is None:
            return self._not_openai(answer)
        if answer.status == 404:
            is_model = "the model" in message.lower()  # as OpenAI and vLLM say it too
            hint = "see what it has with GET /v1/models (--model-name)" if is_model else "does --url end in /v1?"
            message = f"{message}; {hint}"
        elif answer.status in (429, 503):
            message += f"; try again in {retry:g} s" if retry is not None else "; try again later"
        return ServerError(message, answer.status, retry)

    def _not_openai(self, answer: HttpAnswer) -> ServerError:
        start = answer.body[:SHOWN].decode("utf-8", "replace").split("\n")[0].strip()
        said = f"{answer.status} {start!r}" if start else f"{answer.status} and nothing else"
        message = f"{self.url} does not answer as an OpenAI-compatible server: {said}; does --url end in /v1?"
        return ServerError(message, answer.status)


def _answer(response: http.client.HTTPResponse, body: bytes) -> HttpAnswer:
    return HttpAnswer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def server_sent_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event; several data lines are one, and comments are left out."""
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
    """OpenAI puts it under `error`, older servers at the top, web frameworks under `detail`."""
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
        return f"{error.reason or error}; does it speak http:// rather than https://?"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} seconds; check the address (--url)"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; check the host's name (--url)"
    return f"{error.strerror or error}; start a server with quire serve, or give its address (--url)"
