"""Measures one model of the card in a child process: start-up is measured from scratch, and its exit frees all memory.

The child sends each result immediately, so that a crash loses only the current workload; the parent then starts
another child for the remaining ones.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.environment import TRITON_CACHE_DIR, TRITON_HOME

if TYPE_CHECKING:
    from quire.bench.internal.card.workloads import Caller

START_UP = "start-up"
PROFILE = "profile"
SHUT_DOWN = "shut-down"


@dataclass(frozen=True)
class Task:
    """The work of a child process."""

    name: str
    options: dict[str, Any]  # of the engine
    vocab_size: int
    workloads: list[str]
    repetitions: int = 1
    cpu: bool = False
    tiny: bool = False
    profile_batches: list[int] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The parts after start-up, in order."""
        return [*self.workloads, *([PROFILE] if self.profile_batches else [])]


# Messages from child to parent


@dataclass(frozen=True)
class Started:
    marks: dict[str, float]  # wall clock at the end of each phase
    triton_files: tuple[int, int]  # in Triton's cache, before and after start-up
    facts: dict[str, Any]


@dataclass(frozen=True)
class PartStarted:
    part: str


@dataclass(frozen=True)
class Measured:
    part: str
    repetition: int
    figures: dict[str, float]
    seconds: dict[str, list[float]]
    elapsed: float


@dataclass(frozen=True)
class Profiled:
    profile: dict[str, Any]


@dataclass(frozen=True)
class ExpertsTouched:
    counts: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    part: str
    error: str


Event = Started | PartStarted | Measured | Profiled | ExpertsTouched | Failed
Send = Callable[[Event], None]


# The child's side


def child_main(pipe: Connection, task: Task) -> None:
    send: Send = pipe.send
    marks = {"interpreter": time.time()}
    cached = triton_cache_files()
    send(PartStarted(START_UP))
    try:
        from quire import LLM
        from quire.bench.internal.card.experts import experts_touched
        from quire.bench.internal.card.workloads import Caller, device_facts
        from quire.bench.workloads import Workload

        marks["import"] = time.time()
        llm = LLM(**task.options)
        marks["init"] = time.time()
        caller = Caller(llm, task.vocab_size, task.tiny)
        caller.seconds(Workload([list(range(100, 228))], [1]))
        marks["first token"] = time.time()
        send(Started(marks, (cached, triton_cache_files()), device_facts(llm)))
        caller.warm_up(long=not task.cpu)
        if (touched := experts_touched(llm, task.vocab_size)) is not None:
            send(ExpertsTouched(touched))
    except Exception as error:
        send(Failed(START_UP, explain(error)))
        return
    if _run_parts(caller, task, send):
        send(PartStarted(SHUT_DOWN))
    llm.shutdown()


def _run_parts(caller: "Caller", task: Task, send: Send) -> bool:
    """False if an error left the engine unusable before all parts were tried."""
    for part in task.parts:
        send(PartStarted(part))
        try:
            if part == PROFILE:
                _profile(caller, task, send)
            else:
                _repeat(caller, task, part, send)
        except Exception as error:
            send(Failed(part, explain(error)))
            if not _still_works(caller):
                return False
    return True


def _repeat(caller: "Caller", task: Task, part: str, send: Send) -> None:
    from quire.bench.internal.card.workloads import measure

    for repetition in range(task.repetitions):
        began = time.perf_counter()
        outcome = measure(caller, part, repetition, cpu=task.cpu, qwen=task.name.startswith("qwen3"))
        send(Measured(part, repetition, outcome.figures, outcome.seconds, time.perf_counter() - began))


def _profile(caller: "Caller", task: Task, send: Send) -> None:
    from quire.bench.internal.card.profile import profile_decode

    for batch in task.profile_batches:
        send(Profiled(profile_decode(caller.llm, caller.vocab_size, batch, tiny=task.tiny)))


def _still_works(caller: "Caller") -> bool:
    """An error in one workload can make the device fail every later call."""
    try:
        caller.warm_up(long=False)
    except Exception:
        return False
    return True


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def triton_cache_files() -> int:
    folder = Path(TRITON_CACHE_DIR.get() or Path(TRITON_HOME.get() or Path.home(), ".triton", "cache"))
    return sum(1 for path in folder.rglob("*") if path.is_file())


# The parent's side


def run_task(task: Task, limit: float, on_event: Callable[[Event, float], None]) -> None:
    """Run all parts, in a new child after each part that crashed its child. `on_event` also receives the child's start
    time. A part without a message for `limit` seconds is killed."""
    remaining = task
    while True:
        current = _run_child(remaining, limit, on_event)
        if current not in remaining.parts:
            return
        after = remaining.parts[remaining.parts.index(current) + 1 :]
        if not after:
            return
        remaining = replace(
            remaining,
            workloads=[part for part in after if part != PROFILE],
            profile_batches=remaining.profile_batches if PROFILE in after else [],
        )


def _run_child(task: Task, limit: float, on_event: Callable[[Event, float], None]) -> str:
    """The last part that the child started."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    child = context.Process(target=child_main, args=(far, task), name=f"card-{task.name}")
    started = time.time()  # the only clock that processes share on every platform
    child.start()
    far.close()
    current, failed = START_UP, False
    try:
        while near.poll(limit):
            event: Event = near.recv()
            if isinstance(event, PartStarted):
                current, failed = event.part, False
            elif isinstance(event, Failed):
                failed = True
            on_event(event, started)
        on_event(Failed(current, f"no result for {limit:g} s, so it was killed (--limit)"), started)
        return current
    except EOFError:
        child.join(limit)
        if child.exitcode != 0 and not failed:
            on_event(Failed(current, f"the process ended with exit code {child.exitcode}"), started)
        return current
    finally:
        near.close()
        if child.is_alive():
            child.kill()
        child.join()
