"""What each worker process says about itself without a message: words of shared memory without a name."""

import mmap
import os

LINE = 64  # bytes of a cache line: one for each worker
BEAT, DONE, FAILED = range(3)  # heartbeats so far; the last step that is done; the last that failed


class StatusBoard:
    def __init__(self, size: int, fd: int | None = None) -> None:
        """Opens the memory of `fd`, or makes it."""
        self.fd = os.memfd_create("quire-status") if fd is None else fd
        if fd is None:
            os.truncate(self.fd, size * LINE)
        self._words = memoryview(mmap.mmap(self.fd, size * LINE)).cast("Q")

    def get(self, rank: int, word: int) -> int:
        return self._words[rank * LINE // 8 + word]

    def set(self, rank: int, word: int, value: int) -> None:
        self._words[rank * LINE // 8 + word] = value
