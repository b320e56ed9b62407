"""Copies of small arrays to the device, without waiting for it."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch


def to_device(
    device: torch.device, *arrays: np.ndarray | Sequence[int], dtype: type[np.integer] = np.int32
) -> list[torch.Tensor]:
    """Flat copies of `arrays` on the device, in one transfer. From pinned memory: a transfer from pageable memory waits
    for the device. torch keeps pinned memory until the transfer is done."""
    flat = [np.asarray(array, dtype).reshape(-1) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in flat]
    size = np.dtype(dtype).itemsize
    # Each begins at a multiple of 16 bytes: Triton would compile other kernels for unaligned pointers.
    places = list(accumulate((aligned(len(array), size) for array in flat), initial=0))
    staged = torch.empty(places[-1], dtype=torch.int32 if size == 4 else torch.int64, pin_memory=True)
    host = staged.numpy()
    for at, array in zip(places, flat, strict=False):
        host[at : at + len(array)] = array
    there = staged.to(device, non_blocking=True)
    return [there[at : at + len(array)] for at, array in zip(places, flat, strict=False)]


def aligned(count: int, size: int = 4) -> int:
    """`count` integers of `size` bytes, rounded up to 16 bytes."""
    unit = 16 // size
    return -(-count // unit) * unit


def write_to(target: torch.Tensor, array: np.ndarray) -> None:
    """Copy `array` to the beginning of `target` (int32, at a fixed address)."""
    if target.device.type == "cpu":
        target[: len(array)] = torch.from_numpy(array)
        return
    staged = torch.empty(len(array), dtype=torch.int32, pin_memory=True)
    staged.numpy()[:] = array
    target[: len(array)].copy_(staged, non_blocking=True)
