"""The file of one KV-cache block: its bytes, then a sector that tells whether they are right."""

import errno
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from quire.distributed.kv_offload.block_store import Buffer

SECTOR = 4096  # O_DIRECT's unit of offsets, lengths and addresses, on any common disk
TRAILER = struct.Struct("<8sQI32s")  # mark, bytes, their CRC, key
MARK = b"quirekv1"
FILE_MODE = 0o600


class CorruptBlockError(OSError):
    """The file is not what was written: cut off, overwritten, of another block or size."""


class BlockFiles:
    """Reads and writes past the page cache where file system and buffer allow it: memory is scarce, and what was read
    into the device's cache is not read again soon. Elsewhere, quietly, through it."""

    def __init__(self, direct: bool = True) -> None:
        self._direct = getattr(os, "O_DIRECT", 0) if direct else 0
        self._scratch = threading.local()

    def write(self, path: Path, key: bytes, buffer: Buffer) -> int:
        """A new file; returns its bytes."""
        trailer = self._sector()
        trailer[: TRAILER.size] = _trailer(key, buffer)

        def write(fd: int) -> int:
            return os.writev(fd, [buffer, trailer])

        size = len(buffer) + SECTOR
        if self._transfer(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, write) != size:
            raise OSError(errno.ENOSPC, "the disk is full", str(path))
        return size

    def read(self, path: Path, key: bytes, buffer: Buffer) -> None:
        """FileNotFoundError if there is none, CorruptBlockError if it is not right."""
        trailer = self._sector()

        def read(fd: int) -> int:
            return os.readv(fd, [buffer, trailer]) if os.fstat(fd).st_size == len(buffer) + SECTOR else 0

        if self._transfer(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, read) != len(buffer) + SECTOR:
            raise CorruptBlockError(f"{path} has another size")
        if trailer[: TRAILER.size] != _trailer(key, buffer):
            raise CorruptBlockError(f"{path} has another checksum or key")

    def _transfer(self, path: Path, flags: int, call: Callable[[int], int]) -> int:
        if self._direct:
            try:
                return _with_file(path, flags | self._direct, call)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = 0  # from now on: neither the file system nor the buffers will change
        return _with_file(path, flags, call)

    def _sector(self) -> mmap.mmap:
        """This thread's own, at an address that O_DIRECT takes."""
        sector: mmap.mmap | None = getattr(self._scratch, "sector", None)
        if sector is None:
            sector = self._scratch.sector = mmap.mmap(-1, SECTOR)
        return sector


def _with_file(path: Path, flags: int, call: Callable[[int], int]) -> int:
    fd = os.open(path, flags, FILE_MODE)
    try:
        return call(fd)
    finally:
        os.close(fd)


def _trailer(key: bytes, buffer: Buffer) -> bytes:
    return TRAILER.pack(MARK, len(buffer), zlib.crc32(buffer), key)
