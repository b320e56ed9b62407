"""`quire serve` itself: its own process, the real engine, signals."""

import os
import re
import select
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from quire.config.server import ServerConfig, server_config
from quire.entrypoints.cli import serve
from tests.entrypoints.openai.running import running, stub_engine


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-model-len", "512", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, stdout=out, stdin=subprocess.PIPE)
    try:
        yield process, _wait_for_url(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(r"serving .* at (\S+)/v1\n", log.read_text())
        if found:
            return found[1]
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def test_serve_answers_drains_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--served-model-name", "tiny", "--num-gpu-blocks-override", "256") as (process, url):
        assert "curl" in log.read_text()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens >= 1
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        started = [os.pidfd_open(child) for child in children(process.pid)]
        assert started
        process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.wait(20) == 0
        for child in started:
            assert select.select([child], [], [], 10)[0], "a child outlived the server"
            os.close(child)


def test_the_engines_death_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--num-gpu-blocks-override", "256") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt="Once", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        engine = next(p for p in children(process.pid) if b"resource_tracker" not in _command_line(p))
        os.kill(engine, signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)) as error:
            list(stream)
        assert isinstance(error.value, openai.APIError), error.value
        assert process.wait(20) == 1
    assert "the engine has died" in log.read_text()


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


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
    ],
)
def test_wrong_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_config(serve.parser().parse(flags))


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1",
        shell=True,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    with running(stub_engine(), ServerConfig(ssl_keyfile=str(key), ssl_certfile=str(certificate))) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{server.url}/health", verify=trusted).status_code == 200
