"""The loop of an engine process around a core that the test plays, with real sockets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core import engine_process
from quire.core.engine_process import EngineProcess
from quire.engine.engine_connection import EngineChannel, engine_address
from quire.messages.protocol import AddRequests, Call, EngineSummary, Heartbeat, Outputs, Result, Shutdown, Watch
from quire.messages.requests import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    RequestError,
    SchedulerStats,
)
from quire.messages.sampling_params import SamplingParams

SECONDS = 60  # for what must happen at all


class Scheduler:
    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests = requests

    def stats(self) -> SchedulerStats:
        return SchedulerStats(time=time.monotonic())


class Core:
    """Has work from the first request on; a step lasts until it is let go."""

    max_model_len, num_blocks, max_num_seqs = 16, 1, 4
    features = None

    def __init__(self) -> None:
        self.summary = EngineSummary("device", "cache")
        self.executor = SimpleNamespace(on_failure=lambda notify: None, collective_rpc=lambda *call: [])
        self.requests: dict[str, Any] = {}
        self.scheduler = Scheduler({})
        self.may_step = threading.Event()
        self.results: list[EngineCoreOutputs] = []
        self.steps = 0
        self.error: Exception | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.error is not None:
            raise self.error
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: list[str]) -> None: ...

    def wake(self) -> None: ...

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def state(self) -> dict[str, int]:
        raise RuntimeError("no state now")

    def step(self) -> EngineCoreOutputs | None:
        if not self.requests:
            return None
        self.may_step.wait(SECONDS)
        self.steps += 1
        return self.results.pop() if self.results else None

    def shutdown(self) -> None: ...


class Engine:
    def __init__(self, folder: Path) -> None:
        self.core = Core()
        self.process = EngineProcess(lambda: self.core, engine_address(folder), 0.02)  # type: ignore[arg-type, return-value]
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.process.run()), daemon=True)
        self.thread.start()
        self.wire = EngineChannel(folder, 0)
        self.wire.wait_ready()

    def add(self, name: str, index: int, n: int = 1) -> None:
        params = SamplingParams(n=n)
        self.wire.send(AddRequests([EngineCoreRequest(name, index, np.ones(1, np.int32), params, (), 0, 0.0)]))

    def receive(self, kind: type) -> Any:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            message = self.wire.receive(1)
            if isinstance(message, kind) and (kind is not Outputs or len(message.outputs.index)):
                return message
        raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with TemporaryDirectory(prefix="quire-") as folder:
        one = Engine(Path(folder))
        yield one
        one.core.may_step.set()
        one.wire.send(Shutdown())
        one.thread.join(SECONDS)
        assert one.codes == [0]
        one.wire._context.destroy(linger=0)


def test_heartbeats_tell_how_long_a_step_has_lasted(engine: Engine) -> None:
    engine.wire.send(Watch(0))
    assert engine.receive(Heartbeat).step_seconds == 0  # idle, however long
    engine.add("long", 1)
    while engine.receive(Heartbeat).step_seconds < 0.1:
        pass
    engine.core.requests.clear()
    engine.core.may_step.set()
    while engine.receive(Heartbeat).step_seconds:
        pass


def test_who_begins_to_listen_during_a_long_step_hears_of_it(engine: Engine) -> None:
    engine.add("long", 1)
    engine.wire.send(Watch(0))
    while not engine.receive(Heartbeat).step_seconds:
        pass


def test_nobody_who_does_not_listen_gets_heartbeats(engine: Engine) -> None:
    engine.wire.send(Call(1, "nothing"))
    assert engine.receive(Result).error == "unknown call 'nothing'"
    assert not engine.process._watching and not isinstance(engine.wire.receive(0.2), Heartbeat)


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no such thing"), ErrorKind.INVALID), (KeyError("a bug"), ErrorKind.INTERNAL)]
)
def test_a_request_that_the_core_refuses_is_answered_for_all_its_sequences(
    engine: Engine, error: Exception, kind: ErrorKind
) -> None:
    engine.core.error = error
    engine.add("refused", 5, n=3)
    outputs = engine.receive(Outputs).outputs
    assert outputs.index.tolist() == [5, 6, 7] and set(outputs.finish.tolist()) == {FinishReason.ERROR}
    assert {one.kind for one in outputs.errors.values()} == {kind}


def test_a_failing_call_is_answered(engine: Engine) -> None:
    engine.wire.send(Call(1, "state"))
    assert engine.receive(Result).error == "RuntimeError: no state now"


def test_outputs_that_cannot_be_sent_end_their_requests(engine: Engine) -> None:
    """The thread that sends them goes on: everybody's outputs come through it."""
    engine.core.results = [
        EngineCoreOutputs.ended([7], FinishReason.LENGTH),
        EngineCoreOutputs.ended([3], FinishReason.ERROR, RequestError(ErrorKind.INVALID, "\ud800")),
    ]
    engine.core.may_step.set()
    engine.add("a", 3)
    wrong, right = engine.receive(Outputs).outputs, engine.receive(Outputs).outputs
    assert wrong.index.tolist() == [3] and wrong.errors[0].kind == ErrorKind.INTERNAL
    assert right.index.tolist() == [7]


def test_what_arrives_after_a_goodbye_is_ignored(engine: Engine) -> None:
    """A supervisor says it for a front end that died, whose own messages may come later."""
    engine.process._handle(b"gone", Call(1, "reset_prefix_cache"))
    engine.process._watch(b"gone", 1)
    engine.process._handle(b"gone", AddRequests([]))
    assert not engine.process._watching


def test_steps_go_on_beside_a_flood_of_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.engine_process.MESSAGE_SECONDS", 0.0)
    monkeypatch.setattr(engine.process, "_message_seconds", 0.0)
    engine.core.may_step.set()
    handled_at: list[int] = []
    add = engine.core.add_request

    def noted(request: EngineCoreRequest) -> None:
        handled_at.append(engine.core.steps)
        add(request)
        time.sleep(0.001)  # longer than a step of this core

    monkeypatch.setattr(engine.core, "add_request", noted)
    for i in range(50):
        engine.add(str(i), i)
    deadline = time.monotonic() + SECONDS
    while len(handled_at) < 50:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(set(handled_at)) >= 49  # a step after each


@pytest.mark.parametrize("disabled", [False, True])
def test_the_log_line_about_load_can_be_left_out(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    started: list[Any] = []

    class Process:
        def __init__(self, make_core: Any, *_: Any) -> None:
            self.make_core = make_core

        def run(self) -> int:
            self.make_core()
            return 0

    class Logger:
        def __init__(self, scheduler: Any, interval: float) -> None:
            self.scheduler = scheduler
            assert interval == 3.0

        def start(self) -> None:
            started.append(self.scheduler)

    core = Core()
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3")
    monkeypatch.setattr(engine_process, "EngineProcess", Process)
    monkeypatch.setattr(engine_process, "StatsLogger", Logger)
    monkeypatch.setattr(engine_process, "EngineCore", lambda config, executor: core)
    monkeypatch.setattr("quire.executor.uniproc.UniProcExecutor", lambda config: None)
    monkeypatch.setattr("quire.platforms.defaults.with_platform_defaults", lambda config: config)
    monkeypatch.setattr(engine_process, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(engine_process.os, "_exit", lambda code: None)
    monkeypatch.setattr(engine_process.logger, "isEnabledFor", lambda level: True)
    engine_process.engine_process_main(EngineConfig.from_kwargs(disable_log_stats=disabled), "address")
    assert started == ([] if disabled else [core.scheduler])
