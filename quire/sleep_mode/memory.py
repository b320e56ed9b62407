"""What can be given back, by tag, and the host's memory as the simplest case of it."""

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
MADV_DONTNEED = 4


class SleepMemory(Protocol):
    def allocating(self, tag: str) -> AbstractContextManager[None]:
        """What this thread allocates inside is given back by its tag."""
        ...

    def outside(self, tag: str, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these that were allocated elsewhere, and will stay."""
        ...

    def release(self, tag: str, tensors: Iterable[torch.Tensor], keep: bool) -> None:
        """Give the tag's memory back; `keep`: what it holds is kept on the host. `tensors`: those that are not."""
        ...

    def restore(self, tag: str, tensors: Iterable[torch.Tensor]) -> None:
        """At the same addresses, with what was kept, or with zeros in these tensors, which were not."""
        ...


class HostMemory:
    """On a CPU: whole pages are dropped, and are zero when they are touched again. What is to be kept stays there."""

    def allocating(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def outside(self, tag: str, tensors: Iterable[torch.Tensor]) -> int:
        return 0

    def release(self, tag: str, tensors: Iterable[torch.Tensor], keep: bool) -> None:
        if not keep:
            for address, size in storages(tensors):
                drop_pages(address, size)

    def restore(self, tag: str, tensors: Iterable[torch.Tensor]) -> None:
        """The system does, page by page."""


def drop_pages(address: int, size: int) -> None:
    """Those that lie within, and whose neighbours are not touched."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if last <= first:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "memory could not be given back")


def storages(tensors: Iterable[torch.Tensor]) -> set[tuple[int, int]]:
    held = (tensor.untyped_storage() for tensor in tensors)
    return {(storage.data_ptr(), storage.nbytes()) for storage in held}
