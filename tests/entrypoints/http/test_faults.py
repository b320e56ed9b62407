"""Signals, crashes and a full disk: the server exits correctly and leaks nothing."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.server_process import SECONDS, ServerProcess, server_process

COUNTS = pytest.mark.parametrize("count", ["1", "2"])
FLAGS = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "256")
ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Once",
    "max_tokens": 500,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


@contextlib.contextmanager
def streaming(server: ServerProcess, count: int = 4, **client: Any) -> Iterator[list[openai.Stream[Any]]]:
    """Started streams, each on its own connection."""
    clients = [server.client(**client) for _ in range(count)]
    streams = [one.completions.create(**ENDLESS) for one in clients]
    for stream in streams:
        next(stream)
    yield streams
    for one in clients:
        one.close()


@COUNTS
def test_a_second_signal_ends_the_server_at_once(tmp_path: Path, count: str) -> None:
    flags = ("--api-server-count", count, "--shutdown-timeout", "1000")
    with server_process(tmp_path, *FLAGS, *flags) as server, streaming(server) as streams:
        server.process.terminate()
        for stream in streams:
            next(stream)  # they continue
        with pytest.raises(httpx.TransportError):
            while True:
                server.get("/health")  # until the port is closed: the first signal has been handled
        server.process.terminate()
        for stream in streams:
            with contextlib.suppress(openai.APIError, httpx.TransportError):
                list(stream)
        assert server.wait() == 128 + signal.SIGTERM


@COUNTS
def test_a_stopped_engine_is_unhealthy_until_it_continues(tmp_path: Path, count: str) -> None:
    flags = ("--api-server-count", count, "--engine-heartbeat-timeout", "1", "--engine-call-timeout", "1")
    with server_process(tmp_path, *FLAGS, *flags, "--enable-admin") as server:
        assert server.get("/health").status_code == 200
        os.kill(server.engine, signal.SIGSTOP)
        try:
            while (response := server.get("/health")).status_code == 200:
                pass
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_stalled"
            assert "no heartbeat" in response.json()["error"]["message"]
            assert server.post("/reset_prefix_cache").status_code == 503
        finally:
            os.kill(server.engine, signal.SIGCONT)
        while server.get("/health").status_code != 200:
            assert server.process.poll() is None
        response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        while response.status_code == 503:  # from the process that has not received a heartbeat yet
            response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert response.status_code == 200
        server.process.terminate()
        assert server.wait() == 0


def test_the_death_of_an_api_process_ends_the_server(tmp_path: Path) -> None:
    flags = ("--api-server-count", "2", "--rate-limit-requests", "6", "--api-key", "a", "--api-key", "b")
    with server_process(tmp_path, *FLAGS, *flags) as server:
        # A key has six requests, whichever process serves them.
        for allowed in [True] * 6 + [False] * 3:
            status = server.get("/v1/models", headers={"Authorization": "Bearer a"}).status_code
            assert status == (200 if allowed else 429)
        with streaming(server, api_key="b") as streams:
            os.kill(server.apis[1], signal.SIGKILL)
            for stream in streams:
                with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):  # the second from the dead one
                    list(stream)
        assert server.wait() == 1
        assert "API process 1 was killed by SIGKILL" in server.last_lines(1)


@COUNTS
def test_a_full_disk_for_logs(tmp_path: Path, count: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        Path("/dev/full").open("wb") as full,
        server_process(tmp_path, *FLAGS, "--api-server-count", count, stderr=full, port=port) as server,
    ):
        for _ in range(3):
            response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            assert response.status_code == 200
        with streaming(server, 1) as (stream,):
            stream.close()
        server.process.terminate()
        assert server.wait() == 0


def test_the_death_of_the_supervisor_ends_all_processes(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS, "--api-server-count", "2") as server, streaming(server) as streams:
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        for stream in streams:
            with pytest.raises((openai.APIError, httpx.TransportError)):
                list(stream)


@pytest.mark.parametrize("count", ["1", "2"])
def test_an_engine_start_error_has_no_traceback(count: str) -> None:
    flags = ["--kv-cache-dtype", "fp8", "--device", "cpu", "--port", "0", "--api-server-count", count]
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert "kv_cache_dtype 'fp8' needs a GPU; allowed on a CPU: auto" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
