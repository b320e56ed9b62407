"""Compiles kernels ahead, in parallel: one takes most of a second, and a model needs dozens the first time."""

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger("quire")

Job = tuple[str, str, str]  # module, kernel, Triton's own description of the variant

MAX_PROCESSES = 12
NICE = 10
TIMEOUT = 300


@contextmanager
def collecting() -> Iterator[list[Job]]:
    """Inside, no kernel is launched, and a new one is added to the list instead of compiled. Other operations compute
    meaningless values meanwhile."""
    jobs: dict[Job, None] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        jobs[fn.module, fn.name, compile["specialization_data"]] = None
        return True

    def without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    found: list[Job] = []
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, record
    launch, JITFunction.run = JITFunction.run, without_launch
    try:
        yield found
    finally:
        JITFunction.run = launch
        knobs.runtime.jit_cache_hook = before
        found += jobs


def compile_all(jobs: list[Job]) -> None:
    """In child processes, because Triton's compiler holds the GIL; the results are in its cache on disk.

    A failure there is no error here: a missing kernel is compiled at its first launch.
    """
    if not jobs or (marker := _marker(jobs)).exists():
        return
    began = time.perf_counter()
    if _compile(jobs, marker, min(MAX_PROCESSES, (os.cpu_count() or 2) - 1, len(jobs) // 2)):
        spent = time.perf_counter() - began
        logger.info("%d kernels compiled in %.1f s; from now on they come from a cache", len(jobs), spent)


def compile_in_background(jobs: list[Job]) -> None:
    """The same while the engine already serves: in one process, at low priority."""
    if jobs and not (marker := _marker(jobs)).exists():
        threading.Thread(target=_compile, args=(jobs, marker, 1), daemon=True, name="quire-compile").start()


def _compile(jobs: list[Job], marker: Path, count: int) -> bool:
    command = [sys.executable, "-m", "quire.kernels.triton.precompile"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    workers = [subprocess.Popen(command, text=True, **pipes) for _ in range(max(1, count))]
    for i, worker in enumerate(workers):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps({"jobs": jobs[i :: len(workers)], "nice": 0 if count > 1 else NICE}))
        worker.stdin.close()
        worker.stdin = None
    end = time.perf_counter() + TIMEOUT
    complete = True
    for worker in workers:
        try:
            _, errors = worker.communicate(timeout=max(1.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            complete = False
            continue
        if worker.returncode:
            complete = False
            logger.warning("a process that compiles kernels failed: %s", errors.strip()[-300:])
    if complete:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return complete


def _marker(jobs: list[Job]) -> Path:
    """A file in Triton's cache that marks all of these as compiled. Looking up each one would take seconds."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    device = [triton.__version__, str(torch.cuda.get_device_capability())]
    parts = [*device, *(path.read_text() for path in sources), *(part for job in sorted(jobs) for part in job)]
    return Path(knobs.cache.dir) / f"quire-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"


def _preload(job: Job) -> None:
    module, kernel, description = job
    compiled = getattr(importlib.import_module(module), kernel).preload(description)
    # Also compiles the C function that launches it, which otherwise the first launch would do.
    if compiled is not None:
        driver.active.launcher_cls(compiled.src, compiled.metadata)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    os.nice(request["nice"])
    for each in request["jobs"]:
        _preload(tuple(each))
