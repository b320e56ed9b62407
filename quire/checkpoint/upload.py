"""Streams mapped tensors to a device through page-locked buffers: while one is copied there, others are filled."""

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from quire.checkpoint.mapped import check_shape, copy_into

BUFFER_BYTES = 8 << 20  # long enough that a copy's start is no cost, short enough that pinning is none either
SMALL_BYTES = 64 << 10  # the driver takes these along with the call
UPLOAD_THREADS = 8


class Mark(Protocol):
    """A place in the order of copies; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Link(Protocol):
    """How bytes reach a device: in the order of the calls, while the host goes on."""

    device: torch.device

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory, uint8."""
        ...

    def copy(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueue a copy to the device, cast there."""
        ...

    def mark(self) -> Mark:
        """Passed when all that was enqueued before is done."""
        ...


class CudaLink:
    """On the current stream, where the layers' own work with what was loaded follows in order."""

    def __init__(self, device: torch.device) -> None:
        # By its number: reader threads have a current device of their own.
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        if staged.dtype != out.dtype:  # torch would cast on the host, into memory that is not page-locked
            staged = staged.to(out.device, non_blocking=True)
        out.copy_(staged, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class _Buffer(NamedTuple):
    memory: torch.Tensor
    last_copy: Mark


class Upload:
    """The buffers that reader threads share: two for each, so that none waits for its own copy."""

    def __init__(self, link: Link, threads: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.link = link
        self.buffer_bytes = buffer_bytes
        self._left = 2 * threads  # to allocate: a small model needs few
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()

    def copy(self, name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a mapped tensor into `out`, a view of its shape in any type on any device."""
        if not self._takes(stored, out):
            copy_into(name, stored, out)
            return
        check_shape(name, tuple(stored.shape), out)
        for part, to in _parts(stored, out, self.buffer_bytes):
            memory = self._take()
            staged = memory[: part.nbytes].view(part.dtype).view(part.shape)
            staged.copy_(part)
            self.link.copy(staged, to)
            self._free.put(_Buffer(memory, self.link.mark()))

    def _takes(self, stored: torch.Tensor, out: torch.Tensor) -> bool:
        """Not what must be compared number by number on the host, nor what is small."""
        casts = stored.dtype.is_floating_point and out.dtype.is_floating_point and out.dtype.itemsize > 1
        small = stored.nbytes < min(SMALL_BYTES, self.buffer_bytes)
        return out.device == self.link.device and (stored.dtype == out.dtype or casts) and not small

    def wait(self) -> None:
        """Until everything is on the device."""
        self.link.mark().synchronize()

    def _take(self) -> torch.Tensor:
        try:
            found: _Buffer | None = self._free.get_nowait()
        except queue.Empty:
            found = None
        if found is not None and found.last_copy.query():
            return found.memory
        with self._lock:
            allocate = self._left > 0
            self._left -= allocate
        if allocate:
            if found is not None:
                self._free.put(found)
            return self.link.buffer(self.buffer_bytes)
        found = found or self._free.get()
        found.last_copy.synchronize()
        return found.memory


def _parts(stored: torch.Tensor, out: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in parts of at most `limit` bytes of what is stored."""
    if stored.nbytes <= limit:
        yield stored, out
    elif stored.is_contiguous() and out.is_contiguous():
        size = limit // stored.itemsize
        yield from zip(stored.view(-1).split(size), out.view(-1).split(size), strict=True)
    elif rows := limit // stored[0].nbytes:
        yield from zip(stored.split(rows), out.split(rows), strict=True)
    else:
        for row, to in zip(stored, out, strict=True):
            yield from _parts(row, to, limit)
