"""Prevents fragmentation of the C heap while weights are loaded and packed."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MAPPED_FROM = 256 * 1024
# The values at which glibc's dynamic adjustment arrives in a process that frees large buffers.
USUAL_MMAP_THRESHOLD, USUAL_TRIM_THRESHOLD = 32 * 2**20, 64 * 2**20


@contextmanager
def large_buffers_mapped() -> Iterator[None]:
    """Within this context, a freed buffer of a weight's size is returned to the system at once.

    Otherwise glibc allocates such buffers on the heap once the process has freed a large one: weights replaced by
    packed ones leave holes, and the readers' temporaries stay in their threads' arenas. Measured: up to half
    the model's size.
    """
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
    try:
        yield
    finally:
        # Setting a threshold disables the dynamic adjustment, so restore the values at which it would arrive.
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)


@lru_cache(maxsize=1)
def _libc() -> Any:
    """The C library if it is glibc, else None."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
