"""Malformed HTTP on a real server's socket.

An input is a word for how it is sent, a newline, and the bytes: "whole", "slow" (a few bytes at a time), "drop" (the
client resets the connection) or "hold" (the client sends no more and waits for the server to close).
"""

import random
import socket
import struct
import time
from collections.abc import Iterator

from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.server import KEY, MODEL, RESPONSE_SECONDS, ServerTarget

HOST = b"Host: 127.0.0.1\r\n"
AUTH = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
BODY = b'{"prompt": "ab", "max_tokens": 2}'
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST + AUTH


def post(headers: bytes, body: bytes) -> bytes:
    return POST + headers + b"\r\n" + body


CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: " + str(len(BODY)).encode() + b"\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YWJjZA==\r\n"
SEEDS = [
    GET,
    GET * 50,  # pipelined
    post(LENGTH, BODY),
    post(LENGTH, BODY) * 3,
    post(CHUNKED, CHUNKS),
    post(LENGTH, BODY)[:60],
    post(LENGTH, BODY[:5]),
    post(b"Content-Length: 99999999999999999999\r\n", BODY),
    post(b"Content-Length: -1\r\n", BODY),
    post(b"Content-Length: 5\r\nContent-Length: 33\r\n", BODY),
    post(LENGTH + CHUNKED, CHUNKS),
    post(CHUNKED, b"ffffffffffffffffff\r\n" + BODY),
    post(CHUNKED, b"5;" + b"x" * 5000 + b"\r\nhello\r\n0\r\n\r\n"),
    post(CHUNKED, b"0\r\n" + b"A: b\r\n" * 2000 + b"\r\n"),
    post(b"Expect: 100-continue\r\n" + LENGTH, BODY),
    b"GET /health HTTP/1.1\r\n" + HOST + UPGRADE + b"\r\n\x81\x85abcdhello",
    b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x12\x04" + bytes(23),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HOST + b"X\x00: \x00\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health\r\n",
    b"GET http://elsewhere/health HTTP/1.1\r\n" + HOST + b"\r\n",
    b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"\r\n" * 5000 + GET,
    b"\x00" * 1000,
    b"\xff" * 1000,
    b"EHLO fuzz\r\nQUIT\r\n",
]
WAYS = ["whole", "whole", "whole", "drop", "slow", "hold"]
SLOW_PIECES = 20
# Above the server's timeouts, with a margin for a busy machine.
CLOSE_SECONDS = 15.0


class SocketTarget(ServerTarget):
    name = "socket"

    def __init__(self) -> None:
        super().__init__()
        self.descriptors = 0
        self.held: list[tuple[socket.socket, bytes, float]] = []

    def prepare(self) -> None:
        self._valid_request()
        self.descriptors = self.server.descriptors()

    def finish(self) -> None:
        self._close_held(all=True)
        self._valid_request()
        self._assert_descriptors()

    def release(self) -> None:
        for sock, *_ in self.held:
            sock.close()

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        while True:
            data = rng.choice(SEEDS)
            if rng.random() < 0.7:
                data = mutated_bytes(rng, data)
            if rng.random() < 0.1:
                data += rng.choice(SEEDS)
            yield rng.choice(WAYS).encode() + b"\n" + data

    def check(self, data: bytes) -> None:
        self.server.ensure()
        self._close_held()
        way, _, payload = data.partition(b"\n")
        sock = socket.create_connection(("127.0.0.1", self.server.port), RESPONSE_SECONDS)
        try:
            self._send(sock, way, payload)
            if way == b"hold":
                self.held.append((sock, data, time.monotonic()))
            elif way == b"drop":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                sock.shutdown(socket.SHUT_WR)
                _read_all(sock)
        except TimeoutError:
            raise AssertionError(f"neither a response nor a close within {RESPONSE_SECONDS:g} s") from None
        except OSError:
            pass  # the server has closed it
        finally:
            if way != b"hold":
                sock.close()
        self.server.assert_alive()

    def _send(self, sock: socket.socket, way: bytes, payload: bytes) -> None:
        if way != b"slow":
            sock.sendall(payload)
            return
        step = max(1, len(payload) // SLOW_PIECES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(payload), step):
            sock.sendall(payload[begin : begin + step])
            time.sleep(0.002)  # deliberately slow

    def _close_held(self, all: bool = False) -> None:
        """Check that the server has closed connections held for CLOSE_SECONDS."""
        waiting, self.held = self.held, []
        for sock, data, since in waiting:
            left = since + CLOSE_SECONDS - time.monotonic()
            if not all and left > 0:
                self.held.append((sock, data, since))
                continue
            sock.settimeout(max(0.1, left))
            try:
                _read_all(sock)
            except TimeoutError:
                error = AssertionError(f"an idle connection is still open after {CLOSE_SECONDS:g} s")
                error.data = data  # type: ignore[attr-defined]  # an earlier input than the current one
                raise error from None
            except OSError:
                pass
            finally:
                sock.close()

    def _valid_request(self) -> None:
        status, _, response = self.server.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        assert status == 200 and MODEL in response.decode(), response

    def _assert_descriptors(self) -> None:
        deadline = time.monotonic() + RESPONSE_SECONDS
        while (now := self.server.descriptors()) > self.descriptors + 4:
            assert time.monotonic() < deadline, f"{self.descriptors} descriptors became {now}"
            time.sleep(0.05)


def _read_all(sock: socket.socket) -> None:
    deadline = time.monotonic() + (sock.gettimeout() or RESPONSE_SECONDS)
    while sock.recv(1 << 16):
        if time.monotonic() > deadline:
            raise TimeoutError
