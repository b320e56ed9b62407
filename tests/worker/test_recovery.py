import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.workspace import SharedWorkspace, reset_shared_workspaces
from quire.messages.plan import DeviceLostError
from quire.sleep_mode.memory import WEIGHTS, HostMemory
from quire.sleep_mode.sleep import SleepMode
from quire.worker.recovery import Recovery
from quire.worker.transfer import Pending
from quire.worker.worker import Worker

CPU = torch.device("cpu")


class CountingWorkspace(SharedWorkspace):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.arrived = self.new_counters(4)


def test_counters_are_zero_again_after_a_failed_step():
    counters = CountingWorkspace.of(CPU).arrived
    assert CountingWorkspace.of(CPU).arrived is counters
    counters[2] = 7  # a launch counted, and the one that would have counted down never came
    Recovery(CPU, reset_shared_workspaces).after(RuntimeError("no memory for what lies between"))
    assert counters.tolist() == [0, 0, 0, 0]


def test_a_workspace_is_made_outside_of_the_pool_of_the_thread_that_needs_it():
    """What it allocated there would be gone while the engine sleeps, and other engines use the workspace."""

    class Workspace(SharedWorkspace):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.thread = threading.get_ident()

    assert Workspace.of(CPU).thread != threading.get_ident()
    assert Workspace.of(CPU) is Workspace.of(CPU)


def test_counters_are_zero_when_an_engine_wakes():
    sleep_mode = SleepMode(HostMemory())
    sleep_mode.sleep(2)
    counters = CountingWorkspace.of(CPU).arrived
    counters[1] = 3
    sleep_mode.wake([WEIGHTS])
    assert counters.tolist() == [0, 0, 0, 0]


def test_a_lost_device_is_distinguished_from_a_failed_step():
    def alive() -> None: ...

    def dead() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    Recovery(CPU, alive, alive).after(ValueError("one step"))
    with pytest.raises(DeviceLostError, match="no longer computes: ValueError: one step"):
        Recovery(CPU, alive, dead).after(ValueError("one step"))


def test_an_error_of_a_result_resets_nothing():
    """Its step was launched to its end, and another thread may be launching the next one, whose plan is at hand."""
    done: list[str] = []
    probe = functools.partial(done.append, "probed")
    worker = object.__new__(Worker)
    pending: Pending[None] = Pending(lambda: [][0])
    worker.runner = SimpleNamespace(sample_tokens=lambda grammar: pending)
    worker.recovery = Recovery(CPU, functools.partial(done.append, "reset"), probe)
    with pytest.raises(IndexError):
        worker.sample_tokens().result()
    assert done == ["probed"]
    with pytest.raises(DeviceLostError, match="no longer computes: IndexError"):
        Recovery(CPU, probe, lambda: [][0]).probe(IndexError("late"))


def test_on_failure_is_called_for_an_error_of_the_result():
    def broken() -> None:
        raise RuntimeError("late")

    seen: list[Exception] = []
    pending: Pending[None] = Pending(broken)
    pending.on_failure = seen.append
    with pytest.raises(RuntimeError, match="late"):
        pending.result()
    assert [str(error) for error in seen] == ["late"]
