"""Device memory that is given back, against a stand-in for CUDA's driver (stand_in.c)."""

import ctypes
import gc
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from quire.sleep_mode import cuda
from quire.sleep_mode.cuda import CudaMemory
from quire.sleep_mode.cuda_driver import Driver
from quire.sleep_mode.memory import KV_CACHE, TAGS, WEIGHTS
from quire.sleep_mode.sleep import SleepMode, make_sleep_mode

UNIT = 2 << 20
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> ctypes.CDLL:
    product = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parent / "stand_in.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", product, source], check=True)
    return ctypes.CDLL(str(product))


class Device:
    """A driver, memory that sleeps, and what was allocated there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.driver = Driver(library._name)
        self.driver.context()
        self.memory = CudaMemory(self.driver)
        self.allocated: dict[int, bytes] = {}

    def allocate(self, tag: str, size: int) -> int:
        self.driver.set_tag(TAGS.index(tag))
        address = self.driver.allocate(size)
        assert address is not None and address % UNIT == 0
        content = bytes((len(self.allocated) + i) % 251 for i in range(1000)) * (size // 1000 + 1)
        ctypes.memmove(address, content, size)
        self.allocated[address] = content[:size]
        return address

    def holds(self, address: int) -> bool:
        return ctypes.string_at(address, len(self.allocated[address])) == self.allocated[address]

    @property
    def bytes(self) -> int:
        return self._count("bytes").value

    @property
    def pinned(self) -> int:
        return self._count("pinned").value

    def limit(self, size: int) -> None:
        self._count("limit").value = size

    def launch(self) -> None:
        """Kernels that are in flight until someone waits for them."""
        self._count("busy").value = 1

    def _count(self, name: str) -> ctypes.c_size_t:
        return ctypes.c_size_t.in_dll(self.library, f"quire_stand_in_{name}")


@pytest.fixture
def device(stand_in, monkeypatch):
    monkeypatch.setattr(cuda, "PIECE", UNIT + 4096)  # chunks reach over pieces
    made = Device(stand_in)
    yield made
    made.limit(1 << 40)
    for address in made.allocated:
        made.driver.free(address)
    assert made.bytes == 0
    del made.memory
    gc.collect()
    assert made.pinned == 0, "what is pinned is never given back"


def test_what_is_kept_is_there_again_at_the_same_address(device):
    weights = [device.allocate(WEIGHTS, size) for size in (3 * UNIT - 5, 17, UNIT)]
    cache = device.allocate(KV_CACHE, 2 * UNIT)
    assert device.bytes == (3 + 1 + 1 + 2) * UNIT
    for _ in range(2):
        device.memory.release(WEIGHTS, [], keep=True)
        assert device.bytes == 2 * UNIT and device.holds(cache)
        pinned = device.pinned
        device.memory.restore(WEIGHTS, [])
        assert device.bytes == 7 * UNIT and all(map(device.holds, weights))
    assert pinned == device.pinned and pinned >= 5 * UNIT  # the host's memory is pinned once


def test_memory_of_the_host_is_unpinned_before_it_is_unmapped(device):
    small = device.allocate(WEIGHTS, UNIT)
    device.memory.release(WEIGHTS, [], keep=True)
    device.memory.restore(WEIGHTS, [])
    assert device.pinned == UNIT
    more = device.allocate(WEIGHTS, 3 * UNIT)
    device.memory.release(WEIGHTS, [], keep=True)
    assert device.pinned == 4 * UNIT, "the smaller copy is still pinned"
    device.memory.restore(WEIGHTS, [])
    assert device.holds(small) and device.holds(more)
    # In a thread that never used the device.
    dropped, device.memory = [device.memory], CudaMemory(device.driver)
    thread = threading.Thread(target=lambda: (dropped.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert device.pinned == 0


def test_memory_is_freed_once_nothing_in_flight_uses_it(device):
    address = device.allocate(WEIGHTS, UNIT)
    device.launch()
    device.driver.free(address)
    del device.allocated[address]
    assert device.bytes == 0


def test_what_is_discarded_is_not(device):
    weights, cache = device.allocate(WEIGHTS, UNIT), device.allocate(KV_CACHE, UNIT)
    device.memory.release(KV_CACHE, [], keep=False)
    assert device.bytes == UNIT and device.holds(weights)
    device.memory.restore(KV_CACHE, [])
    assert device.bytes == 2 * UNIT and not device.holds(cache)


def test_waking_goes_on_once_there_is_room(device):
    weights = [device.allocate(WEIGHTS, UNIT) for _ in range(4)]
    device.memory.release(WEIGHTS, [], keep=True)
    device.limit(2 * UNIT)  # another process has the rest
    with pytest.raises(RuntimeError, match="no room for the weights of this engine"):
        device.memory.restore(WEIGHTS, [])
    device.limit(1 << 40)
    device.memory.restore(WEIGHTS, [])
    assert all(map(device.holds, weights))


def test_memory_that_is_freed_while_it_sleeps(device):
    first, second = device.allocate(WEIGHTS, UNIT), device.allocate(WEIGHTS, UNIT)
    device.memory.release(WEIGHTS, [], keep=False)
    device.driver.free(first)
    del device.allocated[first]
    device.memory.restore(WEIGHTS, [])
    assert [chunk.address for chunk in device.driver.chunks(TAGS.index(WEIGHTS))] == [second]


def test_no_room_is_no_address(device):
    device.limit(UNIT)
    assert device.driver.allocate(2 * UNIT) is None and device.driver.allocate(-1) is None
    assert device.driver.chunks(0) == device.driver.chunks(1) == []


class Held:
    """A tensor, as far as its place is asked for."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    def untyped_storage(self):
        return self

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


def test_what_other_threads_allocated_is_counted_and_said(device, caplog):
    first, second = device.allocate(WEIGHTS, UNIT), device.allocate(WEIGHTS, 2 * UNIT)
    cache = device.allocate(KV_CACHE, UNIT)
    inside = [Held(first, UNIT), Held(second + UNIT, UNIT)]
    assert device.memory.outside(WEIGHTS, inside) == 0
    elsewhere = [Held(cache, 3 << 30), Held(8, 1 << 30)]
    assert device.memory.outside(WEIGHTS, [*inside, *elsewhere]) == 4 << 30

    SleepMode(device.memory).holds(lambda: inside, tuple, tuple)
    assert not caplog.records
    SleepMode(device.memory).holds(lambda: [*inside, *elsewhere], tuple, tuple)
    assert "4.0 GiB of weights" in caplog.text and "--load-threads 1" in caplog.text


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused_on_a_gpu(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    make_sleep_mode(False, torch.device("cuda"))
    make_sleep_mode(True, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"expandable_segments:False in {name}, or leave out --enable-sleep-mode"):
        make_sleep_mode(True, torch.device("cuda"))
    monkeypatch.setenv(name, "expandable_segments:False")
    with pytest.raises(OSError, match="libcuda"):  # there is no GPU here
        make_sleep_mode(True, torch.device("cuda"))
