"""One model of the card in a process of its own: start-up is measured from nothing, and all memory goes with it.

The child tells each result as soon as it is there, so that one that dies half-way loses only what it was doing; the
parent then starts another for what is left.
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
    """What a child is to do."""

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
        """What comes after start-up, in order."""
        return [*self.workloads, *([PROFILE] if self.profile_batches else [])]


# What a child tells its parent.


@dataclass(frozen=True)
class Started:
    marks: dict[str, float]  # wall clock at the end of each phase
    triton_files: tuple[int, int]  # in Triton's cache, before and after start-up
    facts: dict[str, Any]


@dataclass(frozen=True)
class Begun:
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
class Failed:
    part: str
    error: str


Event = Started | Begun | Measured | Profiled | Failed
Tell = Callable[[Event], None]


# The child's side


def child_main(pipe: Connection, task: Task) -> None:
    tell: Tell = pipe.send
    marks = {"interpreter": time.time()}
    cached = triton_cache_files()
    tell(Begun(START_UP))
    try:
        from quire import LLM
        from quire.bench.internal.card.workloads import Caller, device_facts
        from quire.bench.workloads import Workload

        marks["import"] = time.time()
        llm = LLM(**task.options)
        marks["init"] = time.time()
        caller = Caller(llm, task.vocab_size, task.tiny)
        caller.seconds(Workload([list(range(100, 228))], [1]))
        marks["first token"] = time.time()
        tell(Started(marks, (cached, triton_cache_files()), device_facts(llm)))
        caller.warm_up(long=not task.cpu)
    except Exception as error:
        tell(Failed(START_UP, explain(error)))
        return
    if _run_parts(caller, task, tell):
        tell(Begun(SHUT_DOWN))
    llm.shutdown()


def _run_parts(caller: "Caller", task: Task, tell: Tell) -> bool:
    """Whether all were tried: an engine that an error has broken is left."""
    for part in task.parts:
        tell(Begun(part))
        try:
            if part == PROFILE:
                _profile(caller, task, tell)
            else:
                _repeat(caller, task, part, tell)
        except Exception as error:
            tell(Failed(part, explain(error)))
            if not _still_works(caller):
                return False
    return True


def _repeat(caller: "Caller", task: Task, part: str, tell: Tell) -> None:
    from quire.bench.internal.card.workloads import measure

    for repetition in range(task.repetitions):
        began = time.perf_counter()
        outcome = measure(caller, part, repetition, cpu=task.cpu, qwen=task.name.startswith("qwen3"))
        tell(Measured(part, repetition, outcome.figures, outcome.seconds, time.perf_counter() - began))


def _profile(caller: "Caller", task: Task, tell: Tell) -> None:
    from quire.bench.internal.card.profile import profile_decode

    for batch in task.profile_batches:
        tell(Profiled(profile_decode(caller.llm, caller.vocab_size, batch, tiny=task.tiny)))


def _still_works(caller: "Caller") -> bool:
    """An error in one workload can leave a device that fails every call from then on."""
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


def run_task(task: Task, limit: float, heard: Callable[[Event, float], None]) -> None:
    """Run all parts, in a new child after each one that took its child down. `heard` also gets the time the child was
    started at. A part without news for `limit` seconds is given up."""
    left = task
    while True:
        current = _run_child(left, limit, heard)
        if current not in left.parts:
            return
        after = left.parts[left.parts.index(current) + 1 :]
        if not after:
            return
        left = replace(
            left,
            workloads=[part for part in after if part != PROFILE],
            profile_batches=left.profile_batches if PROFILE in after else [],
        )


def _run_child(task: Task, limit: float, heard: Callable[[Event, float], None]) -> str:
    """The last part that the child began."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    child = context.Process(target=child_main, args=(far, task), name=f"card-{task.name}")
    started = time.time()  # the wall clock is the one clock that both processes share on every platform
    child.start()
    far.close()
    current, failed = START_UP, False
    try:
        while near.poll(limit):
            event: Event = near.recv()
            if isinstance(event, Begun):
                current, failed = event.part, False
            elif isinstance(event, Failed):
                failed = True
            heard(event, started)
        heard(Failed(current, f"no news for {limit:g} s, so it was ended (--limit)"), started)
        return current
    except EOFError:
        child.join(limit)
        if child.exitcode != 0 and not failed:
            heard(Failed(current, f"the process ended with exit code {child.exitcode}"), started)
        return current
    finally:
        near.close()
        if child.is_alive():
            child.kill()
        child.join()
