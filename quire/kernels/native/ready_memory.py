"""Memory that is made ready in the background, before it is used (ready_memory.c)."""

import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.kernels import native
from quire.platforms import cpu_cgroup, cpu_cores

MOST_BYTES = 2 << 30


class ReadyMemory:
    """Keeps the tensors, which are of equal size, until its thread has ended."""

    def __init__(self, tensors: Sequence[torch.Tensor], most: int) -> None:
        size = min(min(tensor.nbytes for tensor in tensors), most // len(tensors))
        self._stop = np.zeros(1, np.int32)
        addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uintp)
        cpus = np.array(sorted(cpu_cores.cpus_of_process()), np.int32)
        arguments = (list(tensors), addresses, size, self._stop, cpus)
        self._thread = threading.Thread(target=_make_ready, args=arguments, name="quire-ready-memory", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _end, self._stop, self._thread)

    def wait(self) -> None:
        self._thread.join()


def make_ready(tensors: Sequence[torch.Tensor], available: Callable[[], int]) -> ReadyMemory | None:
    """The beginning of each, together up to MOST_BYTES and an eighth of what is available; None where it cannot be, and
    under a quota, which the thread would take from those that compute."""
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors) or native.library() is None:
        return None
    try:
        return None if cpu_cgroup.cpu_quota() else ReadyMemory(tensors, min(MOST_BYTES, available() // 8))
    except RuntimeError:  # nobody knows
        return None


def _make_ready(
    tensors: list[torch.Tensor], addresses: np.ndarray, size: int, stop: np.ndarray, cpus: np.ndarray
) -> None:
    arguments = (addresses.ctypes.data, addresses.size, size, stop.ctypes.data, cpus.ctypes.data, cpus.size)
    native.bound("quire_ready_memory")(*arguments)


def _end(stop: np.ndarray, thread: threading.Thread) -> None:
    stop[0] = 1
    if thread is not threading.current_thread():
        thread.join()
