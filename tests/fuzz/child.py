"""Inputs checked in a process of their own, whose time and memory are limited, and whose death says something.

`python -m tests.fuzz.child MODULE:FUNCTION` calls the function for each input that comes in on standard input, and
answers with its text: empty, or what was wrong.
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
from typing import IO

SECRET = "fuzz-secret-8f2c"  # in the child's environment: no output may hold it
STACK_BYTES = 256 << 20  # as compilers of grammars have
MEGABYTE = 1 << 20


class Child:
    def __init__(self, function: str, *, seconds: float, megabytes: int, start_seconds: float = 120.0) -> None:
        """`megabytes` are what one input may add to what the process has before it."""
        self.function = function
        self.seconds = seconds
        self.megabytes = megabytes
        self.start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.child", self.function, str(self.megabytes)]
        environment = os.environ | {"QUIRE_FUZZ_SECRET": SECRET}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._answer(self.start_seconds) == "", "the child did not start"

    def check(self, data: bytes) -> None:
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told below
            _write(self._process.stdin, data)
        wrong = self._answer(self.seconds)
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

    def _answer(self, seconds: float) -> str:
        process = self._process
        assert process is not None and process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            self.stop()
            raise AssertionError(f"no outcome after {seconds:g} s")
        answer = _read(process.stdout)
        if answer is None:
            code = process.wait(10)
            self.stop()
            raise AssertionError(f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")
        return answer.decode("utf-8", "replace")


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
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    # Far beyond what is allowed: the machine must outlive an input that takes all it can get.
    limit = resident(peak=False) + (2 * megabytes + 1024) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    _write(answers, b"")
    while (data := _read(sys.stdin.buffer)) is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident(peak=False)
        try:
            wrong = check(data) or ""
        except BaseException as error:
            wrong = f"{type(error).__name__}: {error}"[:1000]
        grown = (resident(peak=True) - before) // MEGABYTE
        if grown > megabytes:
            wrong = wrong or f"it took {grown} MB of memory; at most {megabytes} are allowed"
        _write(answers, wrong.encode("utf-8", "replace"))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.argv[1], int(sys.argv[2])))
    thread.start()
    thread.join()
