"""Unauthenticated connections: silent, endless, slow, many."""

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from quire.config.server import ServerConfig
from quire.entrypoints.http.connection import ConnectionLimits
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

SOON = 0.2  # seconds, in place of the default limits


@contextmanager
def server_with(step_seconds: float = 0.0, keys: tuple[str, ...] = (), **limits: Any) -> Iterator[StubServer]:
    with stub_server(stub_engine(step_seconds), ServerConfig(**limits), keys) as server:
        yield server


@contextmanager
def connection(server: StubServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        yield sock


def response(sock: socket.socket) -> bytes:
    """Everything received until the server closes."""
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def request(body: str, *, keep: bool = True) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + ("" if keep else "Connection: close\r\n") + "\r\n" + body).encode()


def stream(max_tokens: int) -> str:
    return f'{{"model": "{MODEL}", "prompt": [1], "max_tokens": {max_tokens}, "stream": true, "ignore_eos": true}}'


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half"])
def test_a_silent_connection_is_closed(begun: bytes) -> None:
    with server_with(timeout_request_headers=SOON) as server, connection(server) as sock:
        sock.sendall(begun)
        assert b"408" in (said := response(sock)).split(b"\r\n")[0] and b"--timeout-request-headers" in said


def test_a_dripping_header_is_closed_after_a_kept_connection() -> None:
    with server_with(timeout_request_headers=SOON) as server, connection(server) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /version HTTP/1.1\r\n")
        assert b" 408 " in response(sock)


@pytest.mark.parametrize(
    ("sent", "status", "flag"),
    [
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\n\r\n", 414, b"--max-url-bytes"),
        (b"GET / HTTP/1.1\r\n" + b"X-Y: 1\r\n" * 40 + b"\r\n", 431, b"--h11-max-header-count"),
        (b"GET / HTTP/1.1\r\n" + b"X-Y: %s\r\n" % (b"z" * 900) * 2 + b"\r\n", 431, b"--h11-max-incomplete-event-size"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, b"not an HTTP request"),
        (b"GET \xff HTTP/1.1\r\n\r\n", 400, b"not an HTTP request"),
    ],
)
def test_too_much_before_the_body(sent: bytes, status: int, flag: bytes) -> None:
    limits = {"max_url_bytes": 200, "h11_max_header_count": 30, "h11_max_incomplete_event_size": 1500}
    with server_with(**limits) as server, connection(server) as sock:
        sock.sendall(sent)
        said = response(sock)
        assert int(said.split()[1]) == status and flag in said
        assert server.get("/health").status_code == 200


def test_a_header_or_trailer_without_an_end_is_not_kept() -> None:
    """The parser would buffer it until it is complete."""
    endless = (
        b"GET / HTTP/1.1\r\nX-Long: ",
        b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Long: ",
    )
    with server_with() as server:
        for begun in endless:
            with connection(server) as sock:
                sock.sendall(begun)
                sent = 0
                with pytest.raises(OSError):
                    while sent < 64 << 20:
                        sent += sock.send(b"z" * (1 << 16))
                assert sent < 16 << 20  # the socket's own buffers


def test_connections_are_counted() -> None:
    with server_with(max_connections=3, max_connections_per_address=3) as server, ExitStack() as held:
        for _ in range(3):
            held.enter_context(connection(server))
        server.wait_until(lambda: len(server.server.server_state.connections) == 3)
        with connection(server) as sock:
            said = response(sock)
        assert said.startswith(b"HTTP/1.1 503") and b"--max-connections" in said and b"retry-after" in said
        held.close()
        server.wait_until(lambda: not server.server.server_state.connections)
        assert server.get("/health").status_code == 200


def test_one_address_does_not_take_all() -> None:
    with server_with(max_connections=100, max_connections_per_address=2) as server, ExitStack() as held:
        for _ in range(2):
            held.enter_context(connection(server))
        server.wait_until(lambda: len(server.server.server_state.connections) == 2)
        with connection(server) as sock:
            assert b"--max-connections-per-address" in response(sock)


def test_defaults_leave_descriptors_for_the_rest() -> None:
    limits = ConnectionLimits.of(ServerConfig())
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.per_address < limits.connections < descriptors
    with pytest.raises(ValueError, match="ulimit -n"):
        ConnectionLimits.of(ServerConfig(max_connections=descriptors + 1))


def test_pipelined_responses_are_in_order() -> None:
    with server_with() as server, connection(server) as sock:
        once = request(f'{{"model": "{MODEL}", "prompt": [1], "max_tokens": 2}}')
        sock.sendall(once + once + request(f'{{"model": "{MODEL}", "prompt": [1], "max_tokens": 3}}', keep=False))
        said = response(sock)
    assert said.count(b"HTTP/1.1 200") == 3
    assert [part[:1] for part in said.split(b'"completion_tokens":')[1:]] == [b"2", b"2", b"3"]


def test_a_disconnect_with_pipelined_requests_is_detected() -> None:
    with server_with(step_seconds=0.01) as server:
        with connection(server) as sock:
            sock.sendall(request(stream(8000)) + request(stream(8000)))
            server.wait_until(lambda: bool(server.engine.running))
        server.wait_until(lambda: not server.engine.running and not server.server.context.jobs)


def test_a_pipeline_has_an_end() -> None:
    with server_with(step_seconds=0.01) as server, connection(server) as sock:
        sock.sendall(request(stream(8000)))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        with contextlib.suppress(ConnectionResetError):  # where a part of what was sent is unread
            response(sock)  # the server closes
        server.wait_until(lambda: not server.engine.running)


def test_an_unread_body_does_not_hold_its_connection() -> None:
    with server_with(keys=("k",), timeout_keep_alive=1) as server, connection(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401")
        deadline = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                sock.sendall(b"z")
                time.sleep(0.05)  # a slow client


def test_an_idle_connection_is_closed() -> None:
    """A busy connection is not closed by the idle timeout."""
    with server_with(step_seconds=0.01, timeout_keep_alive=1) as server, connection(server) as sock:
        sock.sendall(request(stream(150)))
        said = response(sock)
        assert said.startswith(b"HTTP/1.1 200") and b"[DONE]" in said


def test_a_client_that_never_reads_is_disconnected() -> None:
    with server_with(timeout_response_write=SOON) as server, connection(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = stream(8000).replace("[1]", "[[1], [2], [3], [4]]").replace('"stream"', '"logprobs": 20, "stream"')
        sock.sendall(request(body))
        server.wait_until(lambda: bool(server.server.context.jobs))
        server.wait_until(lambda: not server.server.context.jobs)
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize("keys", [(), ("k",)])  # with a key, the body comes after the response
def test_a_body_of_tiny_chunks_is_refused(keys: tuple[str, ...]) -> None:
    with server_with(keys=keys) as server, connection(server) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with pytest.raises(OSError):
            for _ in range(1000):
                sock.sendall(b"1\r\n \r\n" * 10_000)


def test_a_body_of_chunks_of_some_size_is_read() -> None:
    body = f'{{"model": "{MODEL}", "prompt": [1], "max_tokens": 1, "user": "{"x" * 500_000}"}}'.encode()
    pieces = [body[at : at + 90] for at in range(0, len(body), 90)]
    with server_with() as server, connection(server) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
        assert response(sock).startswith(b"HTTP/1.1 200")


def test_a_closed_connection_does_not_wait_for_its_client_to_read() -> None:
    """The rest fits the socket buffers, so the write timeout does not apply."""
    with server_with(keys=("k",), timeout_keep_alive=1, timeout_response_write=SOON) as server:
        held = [socket.socket() for _ in range(4)]
        host, port = server.url.removeprefix("http://").split(":")
        for sock in held:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(0.5)
            sock.connect((host, int(port)))
            with contextlib.suppress(OSError):
                while True:
                    sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        server.wait_until(lambda: not server.server.server_state.connections)
        for sock in held:
            sock.close()
