"""Small arrays to the device, and results back, without waiting for it."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def to_device(device: torch.device, *arrays: np.ndarray | Sequence[int]) -> list[torch.Tensor]:
    """int32 copies of `arrays` on the device, in one transfer. From pinned memory: a transfer from any other waits for
    what the device does now. torch keeps such memory until the transfer is done."""
    flat = [np.asarray(array, np.int32).reshape(-1) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in flat]
    # Each begins at a multiple of 16 bytes, always: Triton compiles kernels anew for pointers that do not.
    places = np.cumsum([0, *(aligned(len(array)) for array in flat)])
    staged = torch.empty(int(places[-1]), dtype=torch.int32, pin_memory=True)
    host = staged.numpy()
    for at, array in zip(places, flat, strict=False):
        host[at : at + len(array)] = array
    there = staged.to(device, non_blocking=True)
    return [there[at : at + len(array)] for at, array in zip(places, flat, strict=False)]


def aligned(num_ints: int) -> int:
    """As many int32, rounded up to 16 bytes."""
    return -(-num_ints // 4) * 4


def write_to(target: torch.Tensor, array: np.ndarray) -> None:
    """The beginning of `target` (int32, fixed in memory) becomes `array`."""
    if target.device.type == "cpu":
        target[: len(array)] = torch.from_numpy(array)
        return
    staged = torch.empty(len(array), dtype=torch.int32, pin_memory=True)
    staged.numpy()[:] = array
    target[: len(array)].copy_(staged, non_blocking=True)


class Pending(Generic[T]):
    """Something the device is still working on. `make` builds it from tensors on the host once they have arrived."""

    def __init__(self, make: Callable[..., T], *tensors: torch.Tensor) -> None:
        self._make = make
        self._event: torch.cuda.Event | None = None
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> T:
        if self._event is not None:
            self._event.synchronize()
        return self._make(*(tensor.numpy() for tensor in self._tensors))
