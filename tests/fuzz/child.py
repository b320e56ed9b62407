"""Checks inputs in a child process with limits on time and memory; its crash is a failure of the input.

`python -m tests.fuzz.child MODULE:FUNCTION` calls the function for each input from standard input, and writes its
result: empty, or what was wrong.
"""

import contextlib
import importlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, ClassVar, Self

SECRET = "fuzz-secret-8f2c"  # in the child's environment: no output may contain it
STACK_BYTES = 256 << 20  # as in the grammar compiler's threads
MEGABYTE = 1 << 20


class Child:
    def __init__(self, function: str, *, seconds: float, megabytes: int, start_seconds: float = 120.0) -> None:
        """`megabytes` limit the memory that one input may add."""
        self.function = function
        self.seconds = seconds
        self.megabytes = megabytes
        self.start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.child", self.function, str(self.megabytes)]
        environment = os.environ | {"QUIRE_FUZZ_SECRET": SECRET}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._result(self.start_seconds) == "", "the child did not start"

    def check(self, data: bytes) -> None:
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit is reported below
            _write(self._process.stdin, data)
        wrong = self._result(self.seconds)
        assert not wrong, wrong

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None

    def _result(self, seconds: float) -> str:
        process = self._process
        assert process is not None and process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            self.stop()
            raise AssertionError(f"no outcome after {seconds:g} s")
        result = _read(process.stdout)
        if result is None:
            code = process.wait(10)
            self.stop()
            raise AssertionError(f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        return result.decode("utf-8", "replace")


class ChildTarget:
    """Base of the targets that check their inputs in a child process."""

    function: ClassVar[str]  # MODULE:FUNCTION
    seconds: ClassVar[float]
    megabytes: ClassVar[int]

    def __init__(self) -> None:
        self.child = Child(self.function, seconds=self.seconds, megabytes=self.megabytes)

    def __enter__(self) -> Self:
        self.child.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.stop()

    def check(self, data: bytes) -> None:
        self.child.check(data)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    data = pipe.read(size)
    return data if len(data) == size else None


def resident(peak: bool) -> int:
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def serve(function: str, megabytes: int) -> None:
    module, _, name = function.partition(":")
    check = getattr(importlib.import_module(module), name)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries' prints must not end up among the results
    # Well above the checked limit, to protect the machine from an input that allocates without bound.
    limit = resident(peak=False) + (2 * megabytes + 1024) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    _write(results, b"")
    while (data := _read(sys.stdin.buffer)) is not None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident(peak=False)
        try:
            wrong = check(data) or ""
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"[:1000]
        grown = (resident(peak=True) - before) // MEGABYTE
        if grown > megabytes:
            wrong = wrong or f"it took {grown} MB of memory; at most {megabytes} are allowed"
        _write(results, wrong.encode("utf-8", "replace"))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.argv[1], int(sys.argv[2])))
    thread.start()
    thread.join()
