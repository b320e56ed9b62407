"""The ceiling on the instructions that Quire uses on a CPU: QUIRE_CPU_ISA, for tests and for finding faults."""

from collections.abc import Mapping

from quire.config.environment import ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, QUIRE_CPU_ISA, Environ, Variable

LEVELS = tuple(reversed(QUIRE_CPU_ISA.choices))  # each includes those before it

# What keeps torch's own kernels below the same ceiling. oneDNN knows no level between AVX-512 with fp16 and AMX.
_TORCH_LIMITS: dict[str, dict[Variable[str | None], str]] = {
    "portable": {ONEDNN_MAX_CPU_ISA: "SSE41", ATEN_CPU_CAPABILITY: "default"},
    "avx2": {ONEDNN_MAX_CPU_ISA: "AVX2", ATEN_CPU_CAPABILITY: "avx2"},
    "avx512": {ONEDNN_MAX_CPU_ISA: "AVX512_CORE_FP16"},
    "amx": {},
}


def ceiling(environ: Mapping[str, str] | None = None) -> str:
    """The highest level that may be used; "amx" if none was requested."""
    return QUIRE_CPU_ISA.get(environ)


def allows(level: str, environ: Mapping[str, str] | None = None) -> bool:
    return LEVELS.index(level) <= LEVELS.index(ceiling(environ))


def limit_torch(environ: Environ | None = None) -> None:
    """Before the first tensor operation: torch and oneDNN read their variables once."""
    for variable, value in _TORCH_LIMITS[ceiling(environ)].items():
        variable.set_default(value, environ)
