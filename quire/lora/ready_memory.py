"""Memory that is touched before it is wanted: in a virtual machine, the first touch can take longer than all else that
loading an adapter does."""

import numpy as np

PAGE_BYTES = 4096


class ReadyMemory:
    """For one file about as large as the last: adapters of one kind differ by their headers. Used in one thread."""

    def __init__(self) -> None:
        self._size = 0
        self._ready = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        ready, self._ready, self._size = self._ready, np.empty(0, np.uint8), size
        return ready[:size] if size <= len(ready) <= 1.05 * size else np.empty(size, np.uint8)

    def prepare(self) -> None:
        if not len(self._ready):
            self._ready = np.empty(int(1.02 * self._size), np.uint8)
            self._ready[::PAGE_BYTES] = 0
