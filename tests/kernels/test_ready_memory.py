"""Memory that is made ready in the background keeps its content, and the thread ends with its owner."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.native import ready_memory
from quire.kernels.native.ready_memory import make_ready


@pytest.fixture(autouse=True)
def no_quota(monkeypatch):
    """Of the machine that runs this."""
    monkeypatch.setattr(ready_memory.cpu_cgroup, "cpu_quota", lambda: None)


pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def plenty() -> int:
    return 1 << 40


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def untouched(count: int, size: int) -> list[torch.Tensor]:
    return [torch.from_numpy(np.zeros(size, np.uint8)) for _ in range(count)]


def test_the_beginning_of_all_tensors_is_resident(monkeypatch):
    monkeypatch.setattr(ready_memory, "MOST_BYTES", 48 << 20)
    before, tensors = resident(), untouched(3, 64 << 20)
    made = make_ready(tensors, plenty)
    made.wait()
    assert 44 << 20 <= resident() - before <= 60 << 20


def test_what_is_written_meanwhile_stays():
    tensors = untouched(4, 32 << 20)
    made = make_ready(tensors, plenty)
    for i, tensor in enumerate(tensors):
        tensor.view(torch.int64)[::3] = i + 1
    made.wait()
    for i, tensor in enumerate(tensors):
        numbers = tensor.view(torch.int64)
        assert (numbers[::3] == i + 1).all() and not numbers[1::3].any() and not numbers[2::3].any()


def test_its_thread_ends_with_it(monkeypatch):
    monkeypatch.setattr(ready_memory, "MOST_BYTES", 4 << 30)
    made = make_ready(untouched(2, 1 << 30), plenty)
    name = made._thread.name
    del made
    assert name not in {thread.name for thread in threading.enumerate()}


def test_nothing_to_make_ready():
    assert make_ready([], plenty) is None
    assert make_ready([torch.empty(4, device="meta")], plenty) is None


def test_not_without_knowing_how_much_is_free():
    def unknown() -> int:
        raise RuntimeError("cannot find out how much memory is free")

    tensors = untouched(1, 64 << 20)
    assert make_ready(tensors, unknown) is None
    before, made = resident(), make_ready(tensors, lambda: 8 << 20)
    made.wait()
    assert resident() - before < 8 << 20


def test_none_under_a_quota(monkeypatch):
    monkeypatch.setattr(ready_memory.cpu_cgroup, "cpu_quota", lambda: 2.0)
    assert make_ready(untouched(1, 4096), plenty) is None
