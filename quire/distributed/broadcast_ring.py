"""Messages from one process to several of the same machine, through shared memory.

The writer fills slots in turn and then counts up; each reader counts what it has read in a word of its own. The memory
has no name: the file descriptor is handed to the readers' processes, and nothing is left behind by any of them.
"""

import ctypes
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

SLOTS = 16
SLOT_BYTES = 1 << 18  # a plan of 256 rows has some 10 KiB; pages that are never written take no memory
LINE = 64  # bytes of a cache line: no two processes write to the same one
SPIN_SECONDS = 50e-6
OVERFLOW = 0xFFFFFFFF  # in place of the number of frames: they come by socket
MAX_WAIT = 0.001  # seconds between looks at readers that are behind

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if os.name == "posix" else None
FUTEX_WAIT, FUTEX_WAKE = 0, 1
ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Ring:
    """The memory: a word for the writer, one for each reader, and the slots."""

    def __init__(self, readers: int, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, fd: int | None = None) -> None:
        """Opens the memory of `fd`, or makes it."""
        self.readers, self.slots, self.slot_bytes = readers, slots, slot_bytes
        self._slots_at = -(-LINE * (1 + readers) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("quire-ring") if fd is None else fd
        if fd is None:
            os.truncate(self.fd, self._slots_at + slots * slot_bytes)
        self._memory = mmap.mmap(self.fd, self._slots_at + slots * slot_bytes)
        self.bytes = memoryview(self._memory)
        self.words = self.bytes[: self._slots_at].cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._syscall = ctypes.CDLL(None).syscall
        self._lock = threading.Lock()

    def slot(self, number: int) -> memoryview:
        at = self._slots_at + number % self.slots * self.slot_bytes
        return self.bytes[at : at + self.slot_bytes]

    @property
    def written(self) -> int:
        return self.words[0]

    def read_by(self, reader: int) -> int:
        return self.words[(1 + reader) * LINE // 8]

    def set_read(self, reader: int, count: int) -> None:
        self.fence()
        self.words[(1 + reader) * LINE // 8] = count

    def set_written(self, count: int) -> None:
        self.fence()
        self.words[0] = count
        if FUTEX is not None:
            self._syscall(FUTEX, ctypes.c_void_p(self._address), FUTEX_WAKE, ALL, None)

    def sleep(self, written: int, seconds: float) -> None:
        """Until more than `written` messages are, or so many seconds have passed."""
        if FUTEX is None:
            time.sleep(min(seconds, MAX_WAIT))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        value = ctypes.c_uint32(written & 0xFFFFFFFF)  # little-endian: the low half of the word
        self._syscall(FUTEX, ctypes.c_void_p(self._address), FUTEX_WAIT, value, ctypes.byref(limit))

    def fence(self) -> None:
        """What was written before is visible before what is written after, on processors that reorder stores too."""
        for _ in range(2):
            with self._lock:
                pass


class RingWriter:
    def __init__(self, ring: Ring, overflow: Sequence[zmq.Socket], check: Callable[[], None]) -> None:
        """`overflow` is a socket to each reader; `check` is called while readers are behind, and may raise."""
        self._ring, self._overflow, self._check = ring, overflow, check
        self._written = ring.written

    def write(self, frames: Sequence[Any]) -> None:
        """Returns once the message is in memory; waits while a reader is as many messages behind as there are slots."""
        ring, count = self._ring, self._written
        wait = SPIN_SECONDS
        while count - min(map(ring.read_by, range(ring.readers))) >= ring.slots:
            self._check()
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT)
        slot = ring.slot(count)
        sizes = [len(frame) for frame in frames]
        header = struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        at = len(header)
        if at + sum(sizes) > ring.slot_bytes:
            for socket in self._overflow:
                self._send(socket, frames)
            slot[:4] = struct.pack("<I", OVERFLOW)
        else:
            slot[:at] = header
            for frame, size in zip(frames, sizes, strict=True):
                slot[at : at + size] = frame
                at += size
        self._written = count + 1
        ring.set_written(self._written)

    def _send(self, socket: zmq.Socket, frames: Sequence[Any]) -> None:
        """A socket whose reader is gone would wait for another one."""
        while True:
            try:
                socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                self._check()
                time.sleep(MAX_WAIT)


class RingReader:
    def __init__(self, ring: Ring, reader: int, overflow: zmq.Socket) -> None:
        self._ring, self._reader, self._overflow = ring, reader, overflow
        self._read = ring.read_by(reader)

    def read(self, timeout: float) -> list[Any] | None:
        """The next message's frames, which may be written to; None if there is none for so many seconds."""
        ring = self._ring
        if not self._wait(timeout):
            return None
        ring.fence()
        slot = ring.slot(self._read)
        (count,) = struct.unpack_from("<I", slot)
        frames: list[Any] = []
        if count == OVERFLOW:
            frames = [bytearray(frame) for frame in self._overflow.recv_multipart()]
        else:
            sizes = struct.unpack_from(f"<{count}I", slot, 4)
            at = 4 + 4 * count
            for size in sizes:
                frames.append(bytearray(slot[at : at + size]))
                at += size
        self._read += 1
        ring.set_read(self._reader, self._read)
        return frames

    def _wait(self, timeout: float) -> bool:
        """Spin first: most messages follow one another closely, and to be woken takes longer."""
        ring, began = self._ring, time.perf_counter()
        while ring.written <= self._read:
            passed = time.perf_counter() - began
            if passed >= timeout:
                return False
            if passed < SPIN_SECONDS:
                os.sched_yield()
            else:
                ring.sleep(self._read, timeout - passed)
        return True
