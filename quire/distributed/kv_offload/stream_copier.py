"""Copies between a GPU's blocks and pinned host memory, on streams of their own."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from quire.distributed.kv_offload.host_memory import HostMemory
from quire.distributed.kv_offload.metadata import CopyJob
from quire.kernels.block_copies import gather_blocks, page_table, scatter_blocks
from quire.kernels.transfer import to_device

STAGING_BYTES = 1 << 25  # on the device, for each direction

Events = queue.SimpleQueue["torch.cuda.Event | None"]


@dataclass(slots=True, eq=False)
class _Launched:
    job: CopyJob
    began: torch.cuda.Event
    read: torch.cuda.Event  # its source may be overwritten
    done: torch.cuda.Event


class StreamCopier:
    """A block's layers lie far apart on the device and side by side on the host. So a kernel gathers blocks in a
    buffer, from which neighbouring slots are filled by one large copy, at the speed of the link; and the other way
    round. Each direction has a stream, in whose order its buffer is reused."""

    def __init__(self, pages: Sequence[torch.Tensor], memory: HostMemory, notify: Callable[[], None]) -> None:
        self._pages, self._memory = pages, memory
        self._device = pages[0].device
        self._table = page_table(pages)
        count = max(1, STAGING_BYTES // memory.slot_bytes)
        # Two tensors: Triton compiles other kernels for pointers that are not aligned, as the half of one may be.
        shape = (count, *memory.shape)
        self._saved, self._loaded = (torch.empty(shape, dtype=memory.dtype, device=self._device) for _ in range(2))
        self._save_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)
        self._launched: dict[int, _Launched] = {}
        self._unreported: list[_Launched] = []
        # The null block's page serves to compile the kernels before a step waits for that.
        null = torch.zeros(1, dtype=torch.int64, device=self._device)
        gather_blocks(pages, self._table, null, self._saved[:1])
        scatter_blocks(pages, self._table, null, self._saved[:1])
        events: Events = queue.SimpleQueue()
        self._loads = events
        thread = threading.Thread(target=_notify_of, args=(events, notify), name="quire-kv-loads", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, (self._save_stream, self._load_stream), events, thread)

    def save(self, job: CopyJob) -> None:
        stream, launched = self._save_stream, _new(job)
        stream.wait_event(_recorded(torch.cuda.current_stream(self._device)))
        with torch.cuda.stream(stream):
            (blocks,) = to_device(self._device, job.blocks, dtype=np.int64)
            launched.began.record()
            for start in range(0, len(job.blocks), len(self._saved)):
                part = slice(start, start + len(self._saved))
                staged = self._saved[: len(job.blocks[part])]
                gather_blocks(self._pages, self._table, blocks, staged, start)
                launched.read.record()
                for at, slots in self._memory.runs(job.slots[part]):
                    slots.copy_(staged[at : at + len(slots)], non_blocking=True)
            launched.done.record()
        self._add(launched)

    def load(self, job: CopyJob) -> None:
        stream, launched = self._load_stream, _new(job)
        writable = _recorded(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            (blocks,) = to_device(self._device, job.blocks, dtype=np.int64)
            launched.began.record()
            for start in range(0, len(job.blocks), len(self._loaded)):
                part = slice(start, start + len(self._loaded))
                staged = self._loaded[: len(job.blocks[part])]
                for at, slots in self._memory.runs(job.slots[part]):
                    staged[at : at + len(slots)].copy_(slots, non_blocking=True)
                stream.wait_event(writable)  # only now: plans in flight may still write to these blocks
                scatter_blocks(self._pages, self._table, blocks, staged, start)
            launched.read.record()
            launched.done.record()
        self._add(launched)
        self._loads.put(launched.done)

    def _add(self, launched: _Launched) -> None:
        """Once all of it is launched: a job that fails half-way is not reported from here."""
        self._launched[launched.job.number] = launched
        self._unreported.append(launched)

    def let_overwrite(self, number: int) -> None:
        launched = self._launched.get(number)
        if launched is not None:
            torch.cuda.current_stream(self._device).wait_event(launched.read)

    def rely_on(self, number: int) -> None:
        launched = self._launched.pop(number, None)
        if launched is not None:  # on the rank that reported it the event is past
            torch.cuda.current_stream(self._device).wait_event(launched.done)

    def ended(self) -> list[tuple[CopyJob, float]]:
        ended = [one for one in self._unreported if one.done.query()]
        if ended:
            self._unreported = [one for one in self._unreported if one not in ended]
        return [(one.job, one.began.elapsed_time(one.done) / 1000) for one in ended]

    def wait(self, number: int) -> None:
        launched = self._launched.get(number)  # one that was relied on has ended
        if launched is not None:
            launched.done.synchronize()

    def drain(self) -> None:
        self._save_stream.synchronize()
        self._load_stream.synchronize()

    def close(self) -> None:
        self._end()


def _new(job: CopyJob) -> _Launched:
    began, done = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
    return _Launched(job, began, torch.cuda.Event(), done)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _notify_of(events: Events, notify: Callable[[], None]) -> None:
    """References only the queue, so that an unreferenced copier can be collected."""
    while (event := events.get()) is not None:
        event.synchronize()
        notify()


def _stop(streams: Sequence[torch.cuda.Stream], events: Events, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # of a device that is lost
        for stream in streams:
            stream.synchronize()
    events.put(None)
    thread.join()
