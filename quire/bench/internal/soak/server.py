"""The server of the chaos soak: run under adverse conditions, and restarted after every exit."""

import asyncio
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.processes import Process, server_processes
from quire.bench.serve_child import as_flags, free_port
from quire.bench.serve_client import Target, fetch
from quire.config.environment import process_environment

START_SECONDS = 300.0
END_SECONDS = 60.0  # a server must exit within this after a signal or its engine's death
POLL_SECONDS = 0.05
CLOCK_SOURCE = Path(__file__).with_name("wall_clock.c")
SHARED_MEMORY = re.compile(r"quire|psm_|torch_")


@dataclass(frozen=True)
class Conditions:
    name: str
    api_servers: int = 1
    descriptors: int | None = None  # open-file limit
    full_disk: bool = False  # neither logs nor caches can be written


class ChaosServer:
    def __init__(self, options: dict[str, Any], flags: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.target = Target(f"http://127.0.0.1:{self.port}", timeout=10)
        self.process: subprocess.Popen[bytes] | None = None
        self.conditions = Conditions("fair")
        self.starts = 0
        self.healthy = False  # was healthy since its last start
        self.problems: list[str] = []
        self._command = [sys.executable, "-m", "quire", "serve", "--port", str(self.port), "--no-access-log"]
        self._command += ["--enable-admin", "--shutdown-timeout", "5", *as_flags(options), *flags]
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._log = folder / "log"
        self._descriptors: dict[int, int] = {}  # by process, at the start
        self._seen: dict[int, str] = {}  # start time of every process seen
        self._shared = _shared_memory()
        self._disturbed = False
        self.clock = WallClock(folder)

    def start(self, conditions: Conditions) -> None:
        """Returns once it is healthy, or has exited from a signal of ours."""
        self.conditions = conditions
        self.starts += 1
        self._disturbed = self.healthy = False
        environment = process_environment({"TMPDIR": str(self._temporary)} | self.clock.environment())
        log = self._log
        if conditions.full_disk:
            environment["XDG_CACHE_HOME"] = "/dev/full"
            log = Path("/dev/full")
        with log.open("ab") as out:
            command = [*self._command, "--api-server-count", str(conditions.api_servers)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
        if conditions.descriptors is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (conditions.descriptors, hard))
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            ended = self.process.poll() is not None
            if ended and self._disturbed:
                return
            if ended or time.monotonic() > deadline:
                raise ValueError(f"the server did not start ({conditions.name}):\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)
        self._descriptors = {one.pid: _descriptors(one.pid) for one in self.processes()}
        self.healthy = True

    def _is_healthy(self) -> bool:
        try:
            return asyncio.run(fetch(self.target, "GET", "/health"))[0] == 200
        except (OSError, TimeoutError):
            return False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[Process]:
        if self.process is None:
            return []
        found = server_processes(self.process.pid)
        self._seen |= {one.pid: began for one in found if (began := _began(one.pid))}
        return found

    def send(self, role: str, number: int) -> Process | None:
        """Send a signal to a process with this role: "main" or one of `Process`."""
        found = self.processes()
        chosen = found[:1] if role == "main" else [one for one in found if one.role == role]
        if not chosen:
            return None
        one = chosen[-1]
        self._disturbed = True
        os.kill(one.pid, number)
        return one

    def send_to(self, one: Process, number: int) -> None:
        os.kill(one.pid, number)

    def wait(self) -> None:
        """Wait for the exit of the server and its children."""
        assert self.process is not None
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the server did not end within {END_SECONDS:g} s ({self.conditions.name})")
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + END_SECONDS
        while left := [pid for pid, began in self._seen.items() if _began(pid) == began]:
            if time.monotonic() > deadline:
                self.problems.append(f"{len(left)} processes outlived their server: {left}")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                break
            time.sleep(POLL_SECONDS)
        self._seen.clear()

    def stop(self) -> None:
        if self.running:
            assert self.process is not None
            self.processes()
            self.process.send_signal(signal.SIGTERM)
        if self.process is not None:
            self.wait()

    def check_descriptors(self) -> None:
        """An idle server has as many as at its start, plus a few opened at first use."""
        for one in self.processes():
            before, now = self._descriptors.get(one.pid), _descriptors(one.pid)
            if before is not None and now > before + 16:
                self.problems.append(f"the {one.role} process has {now} open files; it began with {before}")

    def check_leftovers(self) -> None:
        """Files and shared memory left by any server of the run."""
        left = sorted(path.name for path in self._temporary.iterdir())
        if left:
            self.problems.append(f"temporary files are left: {', '.join(left[:5])}")
        shared = _shared_memory() - self._shared
        if shared:
            self.problems.append(f"shared memory is left: {', '.join(sorted(shared)[:5])}")

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace") if self._log.is_file() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-15:])


class WallClock:
    """Shifts the server's wall clock through LD_PRELOAD; needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "clock"
        self._offset.write_bytes(bytes(8))
        self._library = folder / "wall_clock.so"
        compiler = shutil.which("cc")
        command = [str(compiler), "-O1", "-shared", "-fPIC", str(CLOCK_SOURCE), "-o", str(self._library)]
        made = compiler is not None and subprocess.run(command, capture_output=True).returncode == 0
        self.available = made and sys.platform == "linux"

    def environment(self) -> dict[str, str]:
        if not self.available:
            return {}
        return {"LD_PRELOAD": str(self._library), "QUIRE_BENCH_CLOCK": str(self._offset)}

    def step(self, seconds: int) -> None:
        with self._offset.open("r+b") as file:
            file.write(struct.pack("=q", seconds))


def _began(pid: int) -> str:
    """A process's start time; empty if it has exited."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] == "Z" else after_name[19]


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if SHARED_MEMORY.match(path.name)} if folder.is_dir() else set()


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="quire-soak-")
