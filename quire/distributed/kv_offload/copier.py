"""Copies between the device's blocks and slots of host memory."""

import time
from collections.abc import Sequence
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


class OrderedCopier:
    """For a device that computes when it is told to: a copy is done when the call returns."""

    def __init__(self, pages: Sequence[torch.Tensor], memory: HostMemory) -> None:
        self._pages = pages
        (self._slots,) = memory.parts
        self._ended: list[tuple[CopyJob, float]] = []

    def save(self, job: CopyJob) -> None:
        began = time.perf_counter()
        blocks, slots = torch.from_numpy(job.blocks), torch.from_numpy(job.slots)
        for layer, pages in enumerate(self._pages):
            self._slots[:, layer].index_copy_(0, slots, pages.index_select(0, blocks))
        self._ended.append((job, time.perf_counter() - began))

    def load(self, job: CopyJob) -> None:
        began = time.perf_counter()
        blocks, slots = torch.from_numpy(job.blocks), torch.from_numpy(job.slots)
        for layer, pages in enumerate(self._pages):
            pages.index_copy_(0, blocks, self._slots[:, layer].index_select(0, slots))
        self._ended.append((job, time.perf_counter() - began))

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
