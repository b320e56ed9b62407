"""`quire serve` as a child of a benchmark."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.serve_client import Target, fetch
from quire.config.fields import flag

START_UP_SECONDS = 1800  # large models take minutes; a server that fails exits at once
SHUTDOWN_SECONDS = 60
POLL_SECONDS = 0.02
LOG_LINES = 15


@dataclass
class ServerChild:
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    start_up_seconds: float  # from starting the process to a healthy /health

    def log_tail(self) -> str:
        return _log_tail(self.log)


@contextmanager
def serving(options: dict[str, Any], extra_flags: Sequence[str] = ()) -> Iterator[ServerChild]:
    """Starts a server with these engine options and waits until it is healthy; stops it on exit."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        log = Path(folder) / "log"
        port = free_port()
        command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--no-access-log"]
        began = time.perf_counter()
        with log.open("wb") as out:
            process = subprocess.Popen([*command, *as_flags(options), *extra_flags], stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, log)
            yield ServerChild(process, url, log, time.perf_counter() - began)
        finally:
            _end(process)


def as_flags(options: dict[str, Any]) -> list[str]:
    """Engine options as command-line flags."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else "--no-" + flag(name)[2:])
        else:
            words += [flag(name), str(value)]
    return words


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    target = Target(url, timeout=10)
    deadline = time.monotonic() + START_UP_SECONDS
    while time.monotonic() < deadline:
        try:
            if asyncio.run(fetch(target, "GET", "/health"))[0] == 200:
                return
        except OSError:
            pass  # not listening yet
        try:
            code = process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        raise ValueError(f"the server ended with exit code {code} before it was ready:\n{_log_tail(log)}")
    raise ValueError(f"the server was not ready after {START_UP_SECONDS} s:\n{_log_tail(log)}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _log_tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:])
