"""Keeping the C heap free of holes while weights come and go."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MAPPED_FROM = 256 * 1024
# Where glibc's own adjustment of the two ends in a process that frees large buffers.
USUAL_MMAP_THRESHOLD, USUAL_TRIM_THRESHOLD = 32 * 2**20, 64 * 2**20


@contextmanager
def large_buffers_mapped() -> Iterator[None]:
    """While this is open, a freed buffer of a weight's size goes back to the system at once.

    Else glibc puts such buffers on the heap once the process has freed a large one: the weights that packing replaces
    leave holes, and the readers' temporaries stay in their threads' arenas. Measured, up to half the model in size.
    """
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
    try:
        yield
    finally:
        # Setting a threshold ends the adjustment for good, so it is set to where that ends.
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)


@lru_cache(maxsize=1)
def _libc() -> Any:
    """The C library if it is glibc, else None."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
