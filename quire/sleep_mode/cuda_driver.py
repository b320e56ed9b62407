"""The few functions of CUDA's driver that giving memory back needs, and the allocator in C that calls some of them."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from quire.kernels.native.build import library

SOURCE = "device_memory.c"
# In the order of `struct driver` there.
_OF_ALLOCATOR = (
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuCtxSynchronize",
)
_WORD = ctypes.c_uint64


class Chunk(NamedTuple):
    address: int
    size: int
    mapped: bool


class Driver:
    """libcuda, and memory that was allocated through ours. A failure is a RuntimeError."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(path)
        found = library(only=(SOURCE,))
        if found is None:
            raise ValueError(
                "sleep mode needs a C compiler (cc, gcc or clang) for its allocator, and no QUIRE_NATIVE_KERNELS=0"
            )
        self._ours = found
        functions = [ctypes.cast(getattr(self._cuda, name), ctypes.c_void_p).value for name in _OF_ALLOCATOR]
        self._ours.quire_memory_use((ctypes.c_void_p * len(functions))(*functions))
        self._ours.quire_memory_allocate.restype = ctypes.c_void_p
        self._ours.quire_memory_allocate.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._ours.quire_memory_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self._ours.quire_memory_map.argtypes = (_WORD, ctypes.c_int)

    @property
    def allocator_file(self) -> str:
        """The library that torch's pluggable allocator loads: the same one."""
        return self._ours._name

    def set_tag(self, tag: int) -> None:
        """Of what is allocated from now on."""
        self._ours.quire_memory_tag(tag)

    def allocate(self, size: int, device: int = 0) -> int | None:
        address: int | None = self._ours.quire_memory_allocate(size, device, None)
        return address

    def free(self, address: int) -> None:
        self._ours.quire_memory_free(address, 0, 0, None)

    def chunks(self, tag: int) -> list[Chunk]:
        count = self._ours.quire_memory_list(tag, None, 0)
        words = (_WORD * (3 * max(count, 1)))()
        count = min(count, self._ours.quire_memory_list(tag, words, count))
        found = [Chunk(words[3 * i], words[3 * i + 1], bool(words[3 * i + 2])) for i in range(count)]
        return sorted(found)

    def map(self, chunk: Chunk) -> None:
        self._check("cuMemMap", self._ours.quire_memory_map(chunk.address, 1))

    def unmap(self, chunk: Chunk) -> None:
        self._check("cuMemUnmap", self._ours.quire_memory_map(chunk.address, 0))

    def context(self) -> int | None:
        """The calling thread's."""
        found = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(found))
        return found.value

    def enter_context(self, context: int | None) -> None:
        self._call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def pin(self, address: int, size: int) -> bool:
        """Whether the system allows it: copies from and to pinned memory are several times as fast."""
        return self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0

    def unpin(self, address: int) -> None:
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def copy_to_host(self, host: int, device: int, size: int) -> None:
        """Not done until `wait`."""
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), _WORD(device), ctypes.c_size_t(size), None)

    def copy_to_device(self, device: int, host: int, size: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", _WORD(device), ctypes.c_void_p(host), ctypes.c_size_t(size), None)

    def wait(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, error: int) -> None:
        if error:
            raise RuntimeError(f"{name} failed with CUDA's error {error}")


def total(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)
