"""The C kernels as a shared library: compiled once for this machine, found again by what they were made of."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.platforms.cpu_facts import cpu_flags
from quire.platforms.cpu_isa import ceiling

logger = logging.getLogger("quire")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
TIMEOUT = 120

# Added and tried again when a file does not compile: assemblers from before AMX do not know its instructions.
SECOND_TRY = {"amx.c": "-DQUIRE_NO_AMX"}


@functools.cache
def library(*extra_flags: str, only: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """None where there is no compiler, or its product does not load: the torch twins serve then.

    With other flags, or some of the sources only, it is a library of its own, for tests.
    """
    compiler = next(filter(None, (shutil.which(name) for name in ("cc", "gcc", "clang"))), None)
    flags = (*FLAGS, *processor_flags(ceiling()), *extra_flags)
    if platform.system() != "Linux" or os.environ.get("QUIRE_NATIVE_KERNELS") == "0":
        return None
    try:
        path = _cache_folder() / f"kernels-{_fingerprint((*flags, *only))}.so"
        if not path.exists():
            if compiler is None:
                return None
            _compile(compiler, flags, [FOLDER / name for name in only] or sorted(FOLDER.glob("*.c")), path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no native CPU kernels, plain torch instead: %s", error)
        return None


def processor_flags(level: str) -> tuple[str, ...]:
    """What the compiler may use, below the ceiling `level` (platforms/cpu_isa.py)."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if level == "portable":
        return ("-march=x86-64",) if x86 else ()
    if level == "avx2" and {"avx2", "fma", "bmi2"} <= cpu_flags():
        return ("-march=haswell",)
    return ("-march=native",)


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:

        def compile_one(source: Path) -> str:
            made = f"{folder}/{source.stem}.o"
            command = (compiler, *flags, "-c", str(source), "-o", made)
            try:
                _run(*command)
            except OSError:
                if source.name not in SECOND_TRY:
                    raise
                _run(*command, SECOND_TRY[source.name])
            return made

        objects = list(pool.map(compile_one, sources))
        product = f"{folder}/kernels.so"
        # Without -fopenmp: its calls bind to the libgomp that torch has loaded, and to that one's threads.
        _run(compiler, "-shared", "-o", product, *objects, "-lm")
        os.replace(product, path)  # at once: another process may be looking for it


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-500:]}")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "quire"


def _fingerprint(options: tuple[str, ...]) -> str:
    """Of the sources, the options and the processor."""
    try:
        facts = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        processor = [line for line in facts.splitlines() if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        processor = [platform.processor()]
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    return hashlib.sha256("\0".join([*sources, *options, *processor]).encode()).hexdigest()[:16]
