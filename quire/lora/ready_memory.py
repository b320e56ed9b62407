"""Memory that is touched before it is wanted: in a virtual machine, the first touch can take longer than all else that
loading an adapter does."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

PAGE_BYTES = 4096
PART_BYTES = 2 << 20  # milliseconds, where pages are slow to come
MOST = 1 << 30


class ReadyMemory:
    """For one file about as large as the last that was loaded: adapters of one kind differ by their headers. Used in
    one thread."""

    def __init__(self, threads: int = 1) -> None:
        """`threads`: those that touch it, beside each other."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "quire-adapter-memory") if threads > 1 else None
        self._wanted = self._touched = 0
        self._ready = np.empty(0, np.uint8)  # the first `_touched` bytes of it

    def take(self, size: int) -> np.ndarray:
        ready, self._ready = self._ready, np.empty(0, np.uint8)
        return ready[:size] if size <= len(ready) <= 1.05 * size else np.empty(size, np.uint8)

    def expect(self, size: int) -> None:
        """A file of about `size` comes next."""
        self._wanted = size

    def prepare(self) -> bool:
        """Touch a part, once for what is expected. Whether there is more: a file that comes first need not wait for
        that. What cannot be had is done without."""
        wanted, self._wanted = self._wanted, 0
        if not len(self._ready) and 0 < wanted <= MOST:
            with suppress(MemoryError):
                self._ready, self._touched = np.empty(int(1.02 * wanted), np.uint8), 0
        starts = range(self._touched, min(self._touched + self._threads * PART_BYTES, len(self._ready)), PART_BYTES)
        parts = [self._ready[start : start + PART_BYTES] for start in starts]
        try:
            list(map(_touch, parts) if self._pool is None else self._pool.map(_touch, parts))
        except RuntimeError:  # no thread to be had, or the interpreter ends
            return False
        self._touched += sum(map(len, parts))
        return self._touched < len(self._ready)


def _touch(memory: np.ndarray) -> None:
    memory[::PAGE_BYTES] = 0
