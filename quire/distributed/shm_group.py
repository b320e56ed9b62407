"""Ranks of one machine: collectives over shared memory in C (kernels/native/collectives.c), which recorded steps can
contain. Nothing is left behind by a process that is killed: the memory has no name."""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from quire.distributed.group import Count, Group, nobody
from quire.kernels.native import native_function
from quire.kernels.native.build import library

logger = logging.getLogger("quire")

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as collectives.c numbers them
PIECE = 1 << 19  # bytes of a tensor that ranks exchange at once
SPINS, FEW_SPINS = 4000, 50  # of a wait, before it yields: with a core for each rank, and without
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")


class SharedMemoryGroup(Group):
    """Floating-point sums, and any gather or broadcast; the process group does the rest."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup,
        find_gone: Callable[[Sequence[int]], list[str]],
        fd: int,
        handle: int,
    ) -> None:
        super().__init__(ranks, rank, process_group, find_gone)
        self._fd, self._handle = fd, handle

    @classmethod
    def connect(
        cls,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup,
        store: dist.Store,
        timeout: float,
        find_gone: Callable[[Sequence[int]], list[str]] = nobody,
    ) -> "SharedMemoryGroup | None":
        """None on every rank where one of them cannot: on another machine, or without the C kernels."""
        place, size = tuple(ranks).index(rank), len(ranks)
        key, limit = f"shm/{'-'.join(map(str, ranks))}", timedelta(seconds=timeout)
        fd, handle = None, None
        try:
            if library() is not None:
                fd = _open_first(size, store, key) if place == 0 else _open_other(store, key, limit)
                cores = len(os.sched_getaffinity(0))
                spins = SPINS if size <= cores else FEW_SPINS
                handle = native_function("quire_group_open")(fd, place, size, PIECE, rank, spins, timeout)
            elif place == 0:
                store.set(key, "")
        except OSError as error:
            logger.debug("ranks %s share no memory: %s", list(ranks), error)
        store.set(f"{key}/{place}", "opened" if handle else "no")
        if all(store_get(store, f"{key}/{other}", limit) == "opened" for other in range(size)):
            assert fd is not None and handle
            return cls(ranks, rank, process_group, find_gone, fd, handle)
        if handle:
            native_function("quire_group_close")(handle)
        if fd is not None:
            os.close(fd)
        return None

    @property
    def counts(self) -> dict[str, Count]:
        """Those of recorded steps included."""
        found = torch.zeros(len(COLLECTIVES), 2, dtype=torch.int64)
        native_function("quire_group_counts")(self._handle, found.data_ptr())
        counts = dict(self._counts)
        for name, (calls, total) in zip(COLLECTIVES, found.tolist(), strict=True):
            more, other = counts.get(name, (0, 0))
            if calls + more:
                counts[name] = Count(calls + more, total + other)
        return counts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in TYPES:
            return super().all_reduce(x)
        if not x.numel():
            return x
        host = x if x.device.type == "cpu" and x.is_contiguous() else x.cpu().contiguous()
        rows = host.shape[0] if host.dim() else 1
        native_function("quire_all_reduce")(
            self._handle, host.data_ptr(), rows, host.numel() // rows, TYPES[x.dtype]
        )  # fmt: skip
        return x if host is x else x.copy_(host)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        host = x.cpu().contiguous()
        out = torch.empty(*host.shape[:-1], host.shape[-1] * self.size, dtype=x.dtype)
        if host.numel():
            width = host.shape[-1] * host.itemsize
            native_function("quire_all_gather")(
                self._handle, host.data_ptr(), out.data_ptr(), host.nbytes // width, width
            )  # fmt: skip
        return out.to(x.device)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        host = x.cpu().contiguous()
        native_function("quire_broadcast")(self._handle, host.data_ptr(), host.nbytes, source)
        return x if host is x else x.copy_(host)

    def fail(self) -> None:
        native_function("quire_group_fail")(self._handle)

    def close(self) -> None:
        """Recorded steps that contain its collectives raise from now on."""
        if self._fd >= 0:
            native_function("quire_group_close")(self._handle)
            os.close(self._fd)
        self._fd = -1


def store_get(store: dist.Store, key: str, limit: timedelta) -> str:
    store.wait([key], limit)
    return store.get(key).decode()


def _open_first(size: int, store: dist.Store, key: str) -> int:
    """The memory, which the others open through this process."""
    try:
        fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, native_function("quire_group_bytes")(size, PIECE))
        found = os.fstat(fd)
        store.set(key, f"/proc/{os.getpid()}/fd/{fd} {found.st_dev}:{found.st_ino}")
    except OSError:
        store.set(key, "")
        raise
    return fd


def _open_other(store: dist.Store, key: str, limit: timedelta) -> int:
    path, _, identity = store_get(store, key, limit).partition(" ")
    if not path:
        raise OSError("the first rank has made none")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    found = os.fstat(fd)
    if f"{found.st_dev}:{found.st_ino}" != identity:  # the path is of a process of that number on another machine
        os.close(fd)
        raise OSError(f"{path} is something else here")
    return fd
