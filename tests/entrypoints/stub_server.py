"""A real server on a free local port, on an engine without a model."""

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.bench.internal.stub_engine import StubEngine, cycle
from quire.config.server import ServerConfig
from quire.entrypoints.http.app import build_app
from quire.entrypoints.http.server import Server, base_url, bind

TEXT = " one two three four five six seven eight nine ten eleven twelve"
MODEL = "stub"


@dataclass
class StubServer:
    engine: StubEngine
    server: Server
    url: str
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **kwargs)

    def in_loop(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(20)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Checks at every iteration of the server's event loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(wait(), 10), self.loop).result(20)


def stub_engine(step_seconds: float = 0.0) -> StubEngine:
    """Counts: after the token `ids[i]` comes `ids[i + 1]`; every request starts at its prompt's length."""
    engine = StubEngine(cycle([]), step_seconds)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(TEXT, add_special_tokens=False)
    engine.rule = cycle(ids)
    return engine


@contextmanager
def stub_server(
    engine: StubEngine, config: ServerConfig | None = None, api_keys: tuple[str, ...] = ()
) -> Iterator[StubServer]:
    config = config or ServerConfig()
    config.port, config.served_model_name = 0, config.served_model_name or (MODEL,)
    config.shutdown_timeout = min(config.shutdown_timeout, 5)
    sock = bind(config)
    started: list[asyncio.AbstractEventLoop] = []
    event = threading.Event()

    def ready() -> None:
        started.append(asyncio.get_running_loop())
        event.set()

    server = Server(build_app(engine, config, engine.config, api_keys), config, ready)
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    assert event.wait(20)
    try:
        yield StubServer(engine, server, base_url(sock, config), started[0], thread)
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()
        assert not thread.is_alive()


def make_certificate(folder: Path, password: str | None = None) -> tuple[Path, Path]:
    """A key and its certificate for 127.0.0.1, signed by itself."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate)]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def refusal(response: httpx.Response, status: int = 400) -> str:
    """The message of an error response."""
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])
