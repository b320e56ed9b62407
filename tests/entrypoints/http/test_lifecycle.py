"""Disconnecting clients, dying engines, servers that shut down."""

import os
import socket
from typing import Any

import httpx
import openai
import pytest

from quire.config.server import ServerConfig
from quire.engine.async_engine import EngineStalledError
from quire.entrypoints.http.server import bind
from quire.messages.requests import ErrorKind, FinishReason, RequestError
from tests.entrypoints.server_process import resident
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": [1], "max_tokens": 8000}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[1], [[1], [1, 2]]])
def test_a_disconnect_aborts_requests(slow: StubServer, stream: bool, prompt: Any) -> None:
    with pytest.raises(httpx.ReadTimeout):
        body = ENDLESS | {"prompt": prompt, "stream": stream}
        with httpx.stream("POST", f"{slow.url}/v1/completions", json=body, timeout=0.3) as response:
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("enough")
    slow.wait_until(lambda: not slow.engine.running and not slow.server.context.jobs and not slow.engine.streams)
    assert len(slow.engine.aborted) == (1 if prompt == [1] else 2)


def test_a_client_that_never_reads_does_not_grow_the_server() -> None:
    """The engine merges unread outputs, and other clients are not affected."""
    with stub_server(stub_engine()) as server:
        url = httpx.URL(server.url)
        body = b'{"prompt": [1], "max_tokens": 8000, "n": 8, "stream": true, "return_token_ids": true}'
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((url.host, url.port))
            head = (
                b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(body)
            )
            sock.sendall(head + body)
            server.wait_until(lambda: len(server.server.context.jobs) == 1)
            memory = resident(os.getpid())
            server.wait_until(lambda: not server.engine.running)
            assert (resident(os.getpid()) - memory) * os.sysconf("SC_PAGE_SIZE") < 64 << 20
            assert server.client().completions.create(model=MODEL, prompt=[1], max_tokens=3).choices[0].text
            assert len(server.server.context.jobs) == 1
        server.wait_until(lambda: not server.server.context.jobs)


def test_an_engines_death_fails_all_requests(slow: StubServer) -> None:
    stream = slow.client().completions.create(**ENDLESS, stream=True)
    next(stream)
    slow.in_loop(lambda: slow.engine.die("out of memory"))
    with pytest.raises(openai.APIError, match="engine is not running"):
        list(stream)
    slow.thread.join(20)
    assert not slow.thread.is_alive() and slow.server.exit_code == 1


def test_requests_to_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.entrypoints.http.server.TICKS_PER_CHECK", 10**9)  # it would end the server
    with stub_server(stub_engine()) as server:
        server.in_loop(lambda: setattr(server.engine, "dead", "gone"))
        for response in (server.post("/v1/completions", ENDLESS), server.get("/health"), server.get("/ready")):
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
            assert "gone" not in response.text


def test_a_failed_request_shows_the_public_cause_only(slow: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    engine = slow.engine
    processed = engine.output_processor.process

    def failing(outputs: Any) -> Any:
        outputs.finish[:] = FinishReason.ERROR
        error = RequestError(ErrorKind.OUT_OF_MEMORY, "OutOfMemoryError: of a secret device")
        outputs.errors = dict.fromkeys(range(len(outputs.index)), error)
        return processed(outputs)

    engine.output_processor.process = failing  # type: ignore[method-assign]
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match=r"out of memory; .* request id cmpl-") as error:
            slow.client().completions.create(**ENDLESS, stream=stream)
        assert "secret" not in str(error.value)
    assert "of a secret device" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_refused_by_a_busy_engine(slow: StubServer, stream: bool) -> None:
    processed = slow.engine.output_processor.process

    def busy(outputs: Any) -> Any:
        outputs.finish[:] = FinishReason.ERROR
        outputs.errors = {0: RequestError(ErrorKind.BUSY, "structured_outputs: all compilers are busy")}
        return processed(outputs)

    slow.engine.output_processor.process = busy  # type: ignore[method-assign]
    response = slow.post("/v1/completions", ENDLESS | {"stream": stream})
    assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
    assert "all compilers are busy" in response.json()["error"]["message"]


def test_a_stalled_engine_is_reported_and_the_server_keeps_running() -> None:
    with stub_server(stub_engine(0.01)) as server:
        healthy = server.engine.check_health
        seen = []

        async def stalled() -> None:
            seen.append(1)
            raise EngineStalledError("no heartbeat (--engine-heartbeat-timeout)")

        server.in_loop(lambda: setattr(server.engine, "check_health", stalled))
        for path in ("/health", "/ready", "/ping"):
            response = server.get(path)
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_stalled"
            assert "--engine-heartbeat-timeout" in response.text
        assert server.post("/v1/completions", ENDLESS).status_code == 503
        server.wait_until(lambda: len(seen) > 6)  # the server's own checks too
        server.in_loop(lambda: setattr(server.engine, "check_health", healthy))
        assert server.get("/health").status_code == 200 and not server.server.should_exit


class Panic(BaseException):
    """What a Rust library raises."""


@pytest.mark.parametrize("streamed", [False, True])
def test_a_panic_fails_one_request(slow: StubServer, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    """In the tokenizer, for one prompt of several or for the only one."""

    def panic(*_: Any, **__: Any) -> Any:
        raise Panic("of a library")

    other = slow.client().completions.create(**ENDLESS, stream=True)
    next(other)
    monkeypatch.setattr(slow.engine.input_processor, "process", panic)
    for prompt in ([1], [[1], [2]]):
        response = slow.post("/v1/completions", ENDLESS | {"prompt": prompt, "stream": streamed})
        assert response.status_code == 500 and "internal error" in response.json()["error"]["message"]
        assert "of a library" not in response.text
    assert next(other).choices
    other.close()


def test_a_request_that_fails_in_the_middle_of_its_stream(slow: StubServer) -> None:
    stream = slow.client().completions.create(**ENDLESS, stream=True)
    next(stream)
    (entry,) = slow.engine.streams.values()
    slow.in_loop(lambda: entry.fail(RuntimeError("a secret of the server")))
    with pytest.raises(openai.APIError, match="internal error") as error:
        list(stream)
    assert "secret" not in str(error.value)


def test_a_deadline() -> None:
    with stub_server(stub_engine(0.01), ServerConfig(request_timeout=0.2)) as server:
        response = server.post("/v1/completions", ENDLESS)
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        with pytest.raises(openai.APIError, match=r"more than 0\.2 seconds"):
            list(server.client().completions.create(**ENDLESS, stream=True))
        server.wait_until(lambda: not server.engine.running)


def test_shutdown_lets_requests_finish() -> None:
    with stub_server(stub_engine(0.01)) as server:
        stream = server.client().completions.create(model=MODEL, prompt=[1], max_tokens=60, stream=True)
        next(stream)
        server.server.should_exit = True
        assert list(stream)[-1].choices[0].finish_reason == "length"
        server.thread.join(20)
        assert server.server.exit_code == 0


def test_shutdown_aborts_requests_after_the_timeout() -> None:
    with stub_server(stub_engine(0.01), ServerConfig(shutdown_timeout=0.3)) as server:
        stream = server.client().completions.create(**ENDLESS, stream=True)
        next(stream)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        server.thread.join(20)
        assert not server.engine.running


def test_a_port_in_use_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port} is in use.*--port"):
            bind(ServerConfig(port=port))
    with pytest.raises(ValueError, match="--host"):
        bind(ServerConfig(host="no.such.host.invalid"))
