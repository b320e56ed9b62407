"""What this process may use of the CPU: instructions and memory. Cores: cpu_cores.py."""

import os
from collections.abc import Mapping
from pathlib import Path

from quire.config.environment import ONEDNN_MAX_CPU_ISA, Environ
from quire.platforms import cpu_cgroup
from quire.platforms.cpu_isa import allows
from quire.platforms.cpuid import Cpuid

SAFE_ISA = "AVX512_CORE_FP16"  # the highest level below AMX

_AMX_BITS = 1 << 22 | 1 << 24  # leaf 7 EDX: AMX-BF16, AMX-TILE
_TILE_LEAF = 0x1D


def advertises_amx(cpuid: Cpuid) -> bool:
    return cpuid(0, 0).eax >= 7 and bool(cpuid(7, 0).edx & _AMX_BITS)


def amx_is_broken(cpuid: Cpuid) -> bool:
    """AMX is advertised but the leaf with the tile palettes, which oneDNN reads, is missing or empty."""
    if not advertises_amx(cpuid):
        return False
    return cpuid(0, 0).eax < _TILE_LEAF or cpuid(_TILE_LEAF, 0).eax == 0


def cap_onednn_if_amx_is_broken(cpuid: Cpuid | None, environ: Environ | None = None) -> str | None:
    """Keep oneDNN off AMX where it would die with SIGILL. Call before the first matmul: oneDNN reads the variable once.

    Returns a sentence to log, or None where nothing was done.
    """
    if cpuid is None or not amx_is_broken(cpuid) or ONEDNN_MAX_CPU_ISA.is_set(environ):
        return None
    ONEDNN_MAX_CPU_ISA.set(SAFE_ISA, environ)
    return (
        f"this machine advertises AMX without describing its tiles (CPUID leaf {_TILE_LEAF:#x}), which crashes oneDNN; "
        f"{ONEDNN_MAX_CPU_ISA.name}={SAFE_ISA} was set."
    )


def onednn_may_use_amx(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the processor has AMX and oneDNN is not limited below it; call once the platform is prepared."""
    return "amx_bf16" in cpu_flags() and not ONEDNN_MAX_CPU_ISA.is_set(environ)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags as the kernel names them ('flags' on x86, 'Features' on Arm)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def has_fast_bf16(cpuid: Cpuid | None) -> bool:
    """Whether bf16 dot products are instructions rather than emulation."""
    if not allows("avx512"):
        return False
    if cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        return True
    if cpuid is None or cpuid(0, 0).eax < 7:
        return False
    return advertises_amx(cpuid) or bool(cpuid(7, 1).eax & 1 << 5)


def available_memory() -> int:
    """Bytes this process can still allocate: the system's free memory, or its cgroup's limit if that is less."""
    known = [c for c in (machine_memory(), cpu_cgroup.memory_left()) if c is not None]
    if not known:
        raise RuntimeError("cannot find out how much memory is free; set the size of the KV cache explicitly")
    return max(0, min(known))


def machine_memory() -> int | None:
    """Free bytes of the system, whoever may use them."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
