"""`quire serve` on a tiny random model, and the base of the targets that attack it."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

from quire.bench.internal.soak.command import leftovers
from quire.config.fields import flag
from quire.config.server import ServerConfig
from tests.structured_output.model import save_model

KEY = "fuzz-key"
MODEL = "tiny"
START_SECONDS = 120.0
RESPONSE_SECONDS = 10.0
HEALTH_SECONDS = 1.0  # at the 99th percentile
IDLE_SECONDS = 10.0
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Short timeouts, so that cases that run into one are quick.
LIMITS = {"timeout_keep_alive": 1, "timeout_request_headers": 2, "timeout_request_body": 2, "request_timeout": 8}


class FuzzedServer:
    """A server process, restarted after a crash, and a thread that polls its health."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.health: list[float] = []  # seconds of each response
        self._folder = tempfile.TemporaryDirectory(prefix="quire-fuzz-")
        self._log = Path(self._folder.name) / "log"
        self._done = threading.Event()
        self._watch: threading.Thread | None = None

    def start(self) -> None:
        model = Path(self._folder.name) / "model"
        if not model.exists():
            save_model(model)
        known = {field.name for field in dataclasses.fields(ServerConfig)}
        limits = [word for name, value in LIMITS.items() if name in known for word in (flag(name), str(value))]
        command = [sys.executable, "-m", "quire", "serve", str(model), "--port", "0", "--served-model-name", MODEL]
        command += ["--api-key", KEY, "--enable-admin", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--chat-template", TEMPLATE, "--max-model-len", "256", "--num-gpu-blocks-override", "1100"]
        command += ["--dtype", "float32", "--cpu-threads", "1", "--no-access-log", *limits, *self.flags]
        command += ["--structured-outputs-compile-seconds", "3"]
        with self._log.open("ab") as out:
            start = out.tell()
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(rb"serving .* at http://127\.0\.0\.1:(\d+)", self._log.read_bytes()[start:])):
            assert self.process.poll() is None and time.monotonic() < deadline, f"no server:\n{self.log()[-2000:]}"
            time.sleep(0.05)
        self.port = int(found[1])
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_health, daemon=True)
            self._watch.start()

    def ensure(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()

    def stop(self) -> None:
        self._done.set()
        if self._watch is not None:
            self._watch.join()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with lower-case names, and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RESPONSE_SECONDS)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {KEY}"} | (headers or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def assert_alive(self) -> None:
        assert self.process is not None
        # A server whose engine has died needs a moment to exit.
        status, _, body = self.request("GET", "/health")
        code = self.process.poll()
        assert code is None and status == 200, f"the server is gone: {code} {status} {body!r}:\n{self.log()[-2000:]}"

    def state(self) -> dict[str, dict[str, int]]:
        status, _, body = self.request("GET", "/server_info")
        assert status == 200, body
        state: dict[str, dict[str, int]] = json.loads(body)["state"]
        return state

    def assert_idle(self) -> None:
        """No request is left, and every logged traceback names its request."""
        deadline = time.monotonic() + IDLE_SECONDS
        while held := leftovers(self.state()):
            assert time.monotonic() < deadline, f"the server is not idle: {held}"
            time.sleep(0.05)
        lines = self.log().splitlines()
        for i, line in enumerate(lines):
            if line.startswith("Traceback (most recent call last)"):
                named = re.search(r"\brequest \S+", " ".join(lines[max(0, i - 2) : i]))
                assert named, "a traceback names no request:\n" + "\n".join(lines[max(0, i - 3) : i + 30])

    def assert_was_healthy(self) -> None:
        if len(self.health) >= 100:
            assert self.percentile(0.99) <= HEALTH_SECONDS, f"/health took {self.percentile(0.99):.2f} s at p99"
        assert max(self.health, default=0.0) < RESPONSE_SECONDS, "/health did not respond"

    def percentile(self, part: float) -> float:
        ordered = sorted(self.health) or [0.0]
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

    @property
    def note(self) -> str:
        return f"/health p99 {1e3 * self.percentile(0.99):.0f} ms, max {1e3 * self.percentile(1.0):.0f} ms"

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _watch_health(self) -> None:
        while not self._done.wait(0.05):
            began = time.monotonic()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health")[0] == 200:
                    self.health.append(time.monotonic() - began)
                    continue
            process = self.process
            if process is not None and process.poll() is None and time.monotonic() - began >= RESPONSE_SECONDS:
                self.health.append(RESPONSE_SECONDS)


class ServerTarget:
    """Base of the targets that send their inputs to a server."""

    def __init__(self) -> None:
        self.server = FuzzedServer()

    def __enter__(self) -> Self:
        self.server.start()
        self.prepare()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self.finish()
                self.server.assert_idle()
                self.server.assert_was_healthy()
        finally:
            self.release()
            self.server.stop()

    @property
    def note(self) -> str:
        return self.server.note

    def prepare(self) -> None:
        """Called once the server is ready."""

    def finish(self) -> None:
        """Called after the last input, before the final checks."""

    def release(self) -> None:
        """Called before the server is stopped, also after a failure."""
