"""The CPUID instruction from Python: sixteen bytes of machine code in an executable page."""

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple


class Registers(NamedTuple):
    eax: int
    ebx: int
    ecx: int
    edx: int


Cpuid = Callable[[int, int], Registers]  # (leaf, subleaf) -> registers

# System V x86-64: edi = leaf, esi = subleaf, rdx = where to store four 32-bit words.
_CODE = bytes.fromhex(
    "53"  # push rbx
    "4989d0"  # mov r8, rdx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5b"  # pop rbx
    "c3"  # ret
)


def load_cpuid() -> Cpuid | None:
    """A callable that runs CPUID, or None where that is impossible (not x86-64, or executable pages are refused)."""
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "win32":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except (OSError, ValueError):
        return None
    page.write(_CODE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)

    def cpuid(leaf: int, subleaf: int) -> Registers:
        assert not page.closed  # the closure keeps the page, and so the code, alive
        words = (ctypes.c_uint32 * 4)()
        function(leaf, subleaf, ctypes.addressof(words))
        return Registers(*words)

    return cpuid
