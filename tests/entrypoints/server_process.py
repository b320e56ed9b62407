"""`quire serve` in a subprocess, with its child processes, log and exit code."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

SECONDS = 120  # generous, for a busy machine


class ServerProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, folder: Path, url: str) -> None:
        self.process = process
        self.log = log
        self.folder = folder  # where the server puts temporary files
        self.url = url
        self.children = {pid: os.pidfd_open(pid) for pid in children(process.pid)}

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=SECONDS, **{"api_key": "none"} | kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SECONDS, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=SECONDS, **kwargs)

    @property
    def engine(self) -> int:
        """The engine process has by far the most memory."""
        return max(self.children, key=resident)

    @property
    def apis(self) -> list[int]:
        others = self.children.keys() - {self.engine}
        return sorted(pid for pid in others if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes())

    def last_lines(self, count: int = 2) -> str:
        return "\n".join(self.log.read_text().splitlines()[-count:])

    def wait(self) -> int:
        """The exit code, after checking that nothing leaked."""
        code = self.process.wait(SECONDS)
        self.assert_nothing_is_left()
        return code

    def assert_nothing_is_left(self) -> None:
        for pid, descriptor in self.children.items():
            assert select.select([descriptor], [], [], 10)[0], f"child {pid} outlived the server"
        assert not list(self.folder.iterdir())


@contextmanager
def server_process(folder: Path, *flags: str, stderr: Any = None, port: int = 0) -> Iterator[ServerProcess]:
    log, temporary = folder / "log", folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--max-model-len", "512", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stderr=stderr or out,
            stdout=stderr or out,
            stdin=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
    served = None
    try:
        url = f"http://127.0.0.1:{port}" if port else _url(process, log)
        if port:
            eventually(lambda: _answers(url))
        served = ServerProcess(process, log, temporary, url)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if served is not None:
            served.assert_nothing_is_left()
            for descriptor in served.children.values():
                os.close(descriptor)


def eventually(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    found: list[str] = []

    def listening() -> bool:
        assert process.poll() is None, f"the server did not start:\n{log.read_text()}"
        found.extend(re.findall(r"serving .* at (\S+)\n", log.read_text()))
        return bool(found)

    eventually(listening)
    return found[0]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid: int) -> int:
    """Pages of memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
