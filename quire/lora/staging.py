"""Copies of host memory to a device through page-locked buffers, many small ones in each."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quire.lora.factors import bits_of

BUFFER_BYTES = 8 << 20
ALIGNMENT = 16


class Mark(Protocol):
    """A place in the order of copies; `torch.cuda.Event` is one."""

    def synchronize(self) -> None: ...


class Staging:
    """For one thread. While the device copies from one buffer, the next is filled."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], object],
        mark: Callable[[], Mark],
    ) -> None:
        """`buffers`: uint8, of one size. `copy`: enqueues one from a buffer. `mark`: passed when all that was enqueued
        before is done."""
        self._buffers, self._copy, self._mark = buffers, copy, mark
        self._passed: list[Mark | None] = [None] * len(buffers)
        self._current = self._used = 0

    def copy(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueue a copy into `out`, of the same shape and type."""
        rows = max(1, self._buffers[0].nbytes // values[0].nbytes)
        for part, to in zip(values.split(rows), out.split(rows), strict=True):
            staged = self._room(part.nbytes).view(part.dtype).view(part.shape)
            bits_of(staged)[...] = bits_of(part)
            self._copy(staged, to)

    def _room(self, nbytes: int) -> torch.Tensor:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._buffers[self._current].nbytes:
            self._passed[self._current] = self._mark()
            self._current, start = (self._current + 1) % len(self._buffers), 0
            if (mark := self._passed[self._current]) is not None:
                mark.synchronize()
        self._used = start + nbytes
        return self._buffers[self._current][start : self._used]
