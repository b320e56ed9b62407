"""Copies between the device's blocks and slots of host memory."""

import time
from collections.abc import Iterator, Sequence
from ctypes import memmove
from typing import Protocol

import torch

from quire.distributed.kv_offload.host_memory import HostMemory
from quire.distributed.kv_offload.metadata import CopyJob


class Copier(Protocol):
    """Called in the order of plans: blocks of a save have their content when `save` is called, and what was to be done
    with the blocks of a load before is enqueued."""

    def save(self, job: CopyJob) -> None: ...

    def load(self, job: CopyJob) -> None: ...

    def let_overwrite(self, number: int) -> None:
        """What is enqueued from now on overwrites blocks of that save."""
        ...

    def rely_on(self, number: int) -> None:
        """What is enqueued from now on relies on the end of that job, which was reported, if only by another rank."""
        ...

    def ended(self) -> list[tuple[CopyJob, float]]:
        """Jobs that have ended since the last call, with the seconds that each took."""
        ...

    def wait(self, number: int) -> None:
        """Until that save has ended; from any thread."""
        ...

    def drain(self) -> None:
        """Wait until all jobs have ended."""
        ...

    def close(self) -> None:
        """Wait, too: there are no more jobs, and blocks and host memory may be freed."""
        ...


class OrderedCopier:
    """For a device that computes when it is told to: a copy is done when the call returns.

    By addresses: a plan saves a few blocks, with a page of some kilobytes in each layer. Operations of torch take
    longer to start than that takes to copy, and wait for threads that are computing.
    """

    def __init__(self, pages: Sequence[torch.Tensor], memory: HostMemory) -> None:
        (slots,) = memory.parts
        assert all(page[0].is_contiguous() for page in pages)
        self._held = (pages, slots)  # while their addresses are used
        self._slots, self._stride = slots.data_ptr(), slots.stride(0) * slots.itemsize
        self._pages = [(page.data_ptr(), page.stride(0) * page.itemsize) for page in pages]
        self._page_bytes = memory.slot_bytes // len(pages)
        self._ended: list[tuple[CopyJob, float]] = []

    def save(self, job: CopyJob) -> None:
        began = time.perf_counter()
        for page, slot in self._addresses(job):
            memmove(slot, page, self._page_bytes)
        self._ended.append((job, time.perf_counter() - began))

    def load(self, job: CopyJob) -> None:
        began = time.perf_counter()
        for page, slot in self._addresses(job):
            memmove(page, slot, self._page_bytes)
        self._ended.append((job, time.perf_counter() - began))

    def _addresses(self, job: CopyJob) -> Iterator[tuple[int, int]]:
        """Of a page in each layer, for each block, and of its place in the slot."""
        for block, slot in zip(job.blocks.tolist(), job.slots.tolist(), strict=True):
            at = self._slots + slot * self._stride
            for pages, stride in self._pages:
                yield pages + block * stride, at
                at += self._page_bytes

    def let_overwrite(self, number: int) -> None:
        pass

    def rely_on(self, number: int) -> None:
        pass

    def ended(self) -> list[tuple[CopyJob, float]]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, number: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass
