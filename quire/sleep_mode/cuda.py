"""A GPU's memory that sleeps: torch's memory pools over an allocator of ours, and a copy on the host."""

import bisect
import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from quire.sleep_mode.cuda_driver import Chunk, Driver, total
from quire.sleep_mode.memory import TAGS, storages

logger = logging.getLogger("quire")

PIECE = 256 << 20  # bytes that are pinned by one call, and copied by one
PINNING_THREADS = 8
OUT_OF_MEMORY = 2  # CUDA's error

MakePool = Callable[[str], Any]

_allocators: list[Any] = []  # for the life of the process: of some versions of torch a pool has a pointer alone


class CudaMemory:
    """A pool for each tag. Only what a thread allocates inside `allocating` is in one: workspaces and graphs stay."""

    def __init__(self, driver: Driver, device: int = 0, make_pool: MakePool | None = None) -> None:
        """`make_pool`: for an allocator's file; torch's by default."""
        self._driver, self._device = driver, device
        self._make_pool = make_pool or _torch_pool
        self._pools: dict[str, Any] = {}  # for the life of the process: their memory must not be freed
        self._saved: dict[str, HostCopy] = {}  # kept between sleeps, since pinning takes longer than copying
        self._kept: set[str] = set()

    @contextmanager
    def allocating(self, tag: str) -> Iterator[None]:
        if tag not in self._pools:
            self._pools[tag] = self._make_pool(self._driver.allocator_file)
        self._driver.set_tag(TAGS.index(tag))
        with torch.cuda.use_mem_pool(self._pools[tag], self._device):
            yield

    def outside(self, tag: str, tensors: Iterable[torch.Tensor]) -> int:
        """What other threads allocate, such as those that quantize what they read."""
        chunks = self._driver.chunks(TAGS.index(tag))
        firsts = [chunk.address for chunk in chunks]

        def is_inside(address: int) -> bool:
            at = bisect.bisect(firsts, address) - 1
            return at >= 0 and address < firsts[at] + chunks[at].size

        return sum(size for address, size in storages(tensors) if not is_inside(address))

    def release(self, tag: str, tensors: Iterable[torch.Tensor], keep: bool) -> None:
        chunks = self._driver.chunks(TAGS.index(tag))
        self._driver.wait()  # for steps that read or write it
        if keep:
            saved = self._saved.get(tag)
            if saved is not None and saved.size < total(chunks):
                self._saved.pop(tag).close()  # before there is another
                saved = None
            if saved is None:
                saved = self._saved[tag] = HostCopy(self._driver, total(chunks))
            saved.save(chunks)
            self._kept.add(tag)
        for chunk in chunks:
            self._driver.unmap(chunk)

    def restore(self, tag: str, tensors: Iterable[torch.Tensor]) -> None:
        """If another process has the memory meanwhile, a later call goes on where this one ends."""
        chunks = self._driver.chunks(TAGS.index(tag))
        saved = self._saved.get(tag) if tag in self._kept else None
        at = 0
        for chunk in chunks:
            try:
                self._driver.map(chunk)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the GPU has no room for the {tag} of this engine ({total(chunks) / 2**30:.1f} GiB); end what "
                    f"uses it and wake it up again: {error}"
                ) from None
            if saved is not None and not chunk.mapped:
                saved.load(chunk, at)
            at += chunk.size
        self._driver.wait()
        self._kept.discard(tag)
        if saved is None:
            for tensor in tensors:
                tensor.zero_()  # whatever another process left there


class HostCopy:
    """A buffer of the host. The first use pins it, piece by piece in several threads, and copies what is pinned."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver, self.size = driver, size
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # a five-hundredth of the pages to fault in and pin
        self._bytes = np.frombuffer(memory, np.uint8)
        self.address = self._bytes.ctypes.data
        self._pinned: dict[int, bool] = {}  # by the piece's address
        self._context: list[int | None] = []
        self.close = weakref.finalize(self, _unpin, driver, self._context, self._pinned, memory)

    def save(self, chunks: list[Chunk]) -> None:
        """One after the other, each at the sum of the sizes before it."""
        pieces = range(-(-total(chunks) // PIECE))
        context = self._driver.context()
        self._context[:] = [context]
        with ThreadPoolExecutor(PINNING_THREADS, initializer=self._driver.enter_context, initargs=(context,)) as pool:
            ready: list[Future[None]] = [pool.submit(self._pin, number) for number in pieces]
            at = 0
            for chunk in chunks:
                for offset, size in _cut(at, chunk.size):
                    ready[offset // PIECE].result()
                    self._driver.copy_to_host(self.address + offset, chunk.address + offset - at, size)
                at += chunk.size
            self._driver.wait()
        if not all(self._pinned.values()):
            logger.warning("memory of the host cannot be pinned, so that sleep and wake-up are slower (ulimit -l)")

    def load(self, chunk: Chunk, at: int) -> None:
        """Not done until the driver's `wait`."""
        for offset, size in _cut(at, chunk.size):
            self._driver.copy_to_device(chunk.address + offset - at, self.address + offset, size)

    def _pin(self, number: int) -> None:
        address = self.address + number * PIECE
        if address not in self._pinned:
            size = min(PIECE, self.size - number * PIECE)
            # The driver would have pages made one after the other, whatever the number of threads.
            self._bytes[number * PIECE : number * PIECE + size : mmap.PAGESIZE] = 0
            self._pinned[address] = self._driver.pin(address, size)


def _unpin(driver: Driver, contexts: list[int | None], pinned: dict[int, bool], memory: mmap.mmap) -> None:
    """While the memory is still mapped: pages that stay pinned are never given back."""
    if contexts and driver.context() is None:  # of the thread that happens to collect this
        driver.enter_context(contexts[0])
    for address, is_pinned in pinned.items():
        if is_pinned:
            driver.unpin(address)


def _cut(first: int, size: int) -> Iterator[tuple[int, int]]:
    """A range, cut where pieces end: a copy must not reach from pinned memory into another piece."""
    last = first + size
    while first < last:
        end = min(last, (first // PIECE + 1) * PIECE)
        yield first, end - first
        first = end


def _torch_pool(allocator_file: str) -> Any:
    names = ("quire_memory_allocate", "quire_memory_free")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(allocator_file, *names)
    _allocators.extend((allocator, inner := allocator.allocator()))
    return torch.cuda.MemPool(inner)
