"""`quire serve` itself: its own process, the real engine, signals."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.config.server import ServerConfig, server_config
from quire.entrypoints.cli import serve
from tests.entrypoints.server_process import SECONDS, eventually, server_process
from tests.entrypoints.stub_server import make_certificate, stub_engine, stub_server

COUNTS = pytest.mark.parametrize("count", ["1", "2"])
ENDLESS: dict[str, Any] = {"prompt": "Once", "max_tokens": 500, "stream": True, "extra_body": {"ignore_eos": True}}


@COUNTS
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_serve_responds_drains_and_cleans_up(tmp_path: Path, count: str, ending: signal.Signals) -> None:
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "256", "--api-server-count", count)
    with server_process(tmp_path, *flags) as server:
        eventually(lambda: server.log.read_text().count("curl") == 1)  # the line after the one with the address
        assert len(server.apis) == (int(count) if count != "1" else 0)
        client = server.client()
        response = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
        )
        assert response.usage is not None and response.usage.completion_tokens >= 1
        streams = [client.completions.create(model="tiny", **ENDLESS | {"max_tokens": 8}) for _ in range(4)]
        for stream in streams:
            next(stream)
        server.process.send_signal(ending)
        for stream in streams:
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.wait() == 0


@COUNTS
def test_the_engines_death_ends_the_server(tmp_path: Path, count: str) -> None:
    with server_process(tmp_path, "--num-gpu-blocks-override", "256", "--api-server-count", count) as server:
        client = server.client()
        name = client.models.list().data[0].id
        streams = [client.completions.create(model=name, **ENDLESS) for _ in range(4)]
        for stream in streams:
            next(stream)
        os.kill(server.engine, signal.SIGKILL)
        for stream in streams:
            with pytest.raises((openai.APIError, httpx.RemoteProtocolError)) as error:
                list(stream)
            assert isinstance(error.value, openai.APIError), error.value
            assert "engine is not running" in str(error.value)
        with contextlib.suppress(httpx.TransportError):  # gone already
            assert server.get("/health").status_code == 503
        assert server.wait() == 1
        assert "the engine" in server.last_lines() and "was killed by SIGKILL" in server.last_lines()


@COUNTS
def test_an_engine_that_cannot_start_ends_the_server(tmp_path: Path, count: str) -> None:
    flags = ["--num-gpu-blocks-override", "2", "--api-server-count", count]
    done = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-model-len", "512", *flags],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1 and "the longest that fits" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@COUNTS
def test_a_port_in_use_ends_the_server_at_once(count: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "quire", "serve", "--port", port, "--api-server-count", count],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 2 and f"{port} is in use" in done.stderr and "Traceback" not in done.stderr


def test_flags() -> None:
    args = serve.parser().parse(
        ["m", "--api-key", "a", "--api-key", "b", "--no-access-log", "--max-request-bytes", "1M"]
    )
    config = server_config(args)
    assert config.api_key == ("a", "b") and not config.access_log and config.max_request_bytes == 1 << 20
    assert args.model == "m" and (config.host, config.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "99999"], "port is 99999"),
        (["--ssl-keyfile", "k"], "TLS needs both"),
        (["--root-path", "x"], "must begin with /"),
        (["--rate-limit-requests", "0"], "rate_limit_requests is 0"),
        (["--api-server-count", "0"], "between 1 and 64"),
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_config(serve.parser().parse(flags))


@pytest.mark.parametrize("password", [None, "secret"])
def test_tls(tmp_path: Path, password: str | None) -> None:
    key, certificate = make_certificate(tmp_path, password)
    config = ServerConfig(ssl_keyfile=str(key), ssl_certfile=str(certificate), ssl_keyfile_password=password)
    with stub_server(stub_engine(), config) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
