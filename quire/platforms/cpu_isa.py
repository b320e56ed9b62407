"""The ceiling on the instructions that Quire uses on a CPU: QUIRE_CPU_ISA, for tests and for finding faults."""

import os
from collections.abc import Mapping, MutableMapping

VARIABLE = "QUIRE_CPU_ISA"
LEVELS = ("portable", "avx2", "avx512", "amx")  # each includes those before it
ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"

# Keep torch's own kernels below the same ceiling. oneDNN knows no level between AVX-512 with fp16 and AMX.
_TORCH_LIMITS = {
    "portable": {ONEDNN_ISA: "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "avx2": {ONEDNN_ISA: "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {ONEDNN_ISA: "AVX512_CORE_FP16"},
    "amx": {},
}


def ceiling(environ: Mapping[str, str] = os.environ) -> str:
    """The highest level that may be used; "amx" if the variable is not set."""
    level = environ.get(VARIABLE, "amx")
    if level not in LEVELS:
        raise ValueError(f"{VARIABLE} is {level!r}; allowed: {', '.join(reversed(LEVELS))}")
    return level


def allows(level: str, environ: Mapping[str, str] = os.environ) -> bool:
    return LEVELS.index(level) <= LEVELS.index(ceiling(environ))


def limit_torch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before the first tensor operation: torch and oneDNN read their variables once."""
    for name, value in _TORCH_LIMITS[ceiling(environ)].items():
        environ.setdefault(name, value)
