import pytest
import torch

from quire.kernels.counters import zeroed_counters
from quire.messages.plan import DeviceLostError
from quire.worker.recovery import Recovery
from quire.worker.transfer import Pending

CPU = torch.device("cpu")


def test_counters_are_zero_again_after_a_failed_step():
    counters = zeroed_counters(4, CPU)
    counters[2] = 7  # a launch counted, and the one that would have counted down never came
    Recovery(CPU).after(RuntimeError("no memory for what lies between"))
    assert counters.tolist() == [0, 0, 0, 0]


def test_a_device_that_computes_no_more_is_told_from_a_failed_step():
    def answers() -> None: ...

    def dead() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    Recovery(CPU, answers).after(ValueError("one step"))
    with pytest.raises(DeviceLostError, match="computes no more: ValueError: one step"):
        Recovery(CPU, dead).after(ValueError("one step"))


def test_a_failure_that_shows_in_the_result_is_looked_into():
    def broken() -> None:
        raise RuntimeError("late")

    seen: list[Exception] = []
    pending: Pending[None] = Pending(broken)
    pending.on_failure = seen.append
    with pytest.raises(RuntimeError, match="late"):
        pending.result()
    assert [str(error) for error in seen] == ["late"]
