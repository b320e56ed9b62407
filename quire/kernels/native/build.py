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
from contextlib import nullcontext
from pathlib import Path

from quire.config.environment import QUIRE_NATIVE_KERNELS, TMPDIR, XDG_CACHE_HOME, process_environment
from quire.platforms.cpu_facts import cpu_flags
from quire.platforms.cpu_isa import ceiling
from quire.platforms.private_files import PrivateFolder, path_of

logger = logging.getLogger("quire")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp", "-Werror=implicit-function-declaration")
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
    if platform.system() != "Linux" or not QUIRE_NATIVE_KERNELS.get():
        return None
    sources = [FOLDER / name for name in only] or sorted(FOLDER.glob("*.c"))
    name = f"kernels-{_fingerprint((*flags, *only))}.so"
    try:
        with _open_cache() or nullcontext() as cache:
            found = None if cache is None else _cached(cache, name)
            if found is None and compiler is not None:
                found = _compiled(compiler, flags, sources, name, cache)
            # The descriptor stays open: the loader knows a library by its name, which would come to mean another one.
            return None if found is None else ctypes.CDLL(str(path_of(found)))
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


def _open_cache() -> PrivateFolder | None:
    """None, and a warning, where others could plant a library of theirs, or there is no place for one."""
    root = XDG_CACHE_HOME.get() or os.path.expanduser("~/.cache")
    try:
        if not os.path.isabs(root):
            raise OSError(f"there is no home folder, and {XDG_CACHE_HOME.name} names none ({root!r})")
        return PrivateFolder(Path(root) / "quire")
    except OSError as error:
        logger.warning("compiled kernels are not kept, every start compiles them anew: %s", error)
        return None


def _cached(cache: PrivateFolder, name: str) -> int | None:
    try:
        return cache.open(name)
    except OSError as error:
        logger.warning("a compiled library is not used and made anew: %s", error)
        return None


def _compiled(
    compiler: str, flags: tuple[str, ...], sources: list[Path], name: str, cache: PrivateFolder | None
) -> int:
    """A descriptor of the library, made in a folder that is gone afterwards; a copy goes into the cache."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        PrivateFolder(Path(folder)).close()  # a user who can rename it could put in other objects
        product = _compile(compiler, flags, sources, folder)
        if cache is not None:
            try:
                cache.put(name, product)
                kept = cache.open(name)
                if kept is not None:
                    return kept
            except OSError as error:
                logger.warning("compiled kernels could not be kept in %s: %s", cache.path, error)
        return os.open(product, os.O_RDONLY)


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], folder: str) -> Path:
    environment = process_environment({TMPDIR.name: folder})

    def compile_one(source: Path) -> str:
        made = f"{folder}/{source.stem}.o"
        command = (compiler, *flags, "-c", str(source), "-o", made)
        try:
            _run(environment, *command)
        except OSError:
            if source.name not in SECOND_TRY:
                raise
            _run(environment, *command, SECOND_TRY[source.name])
        return made

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, sources))
    product = f"{folder}/kernels.so"
    # Without -fopenmp: its calls bind to the libgomp that torch has loaded, and to that one's threads.
    _run(environment, compiler, "-shared", "-o", product, *objects, "-lm")
    return Path(product)


def _run(environment: dict[str, str], *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-500:]}")


def _fingerprint(options: tuple[str, ...]) -> str:
    """Of the sources, the options and the processor."""
    try:
        facts = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        processor = [line for line in facts.splitlines() if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        processor = [platform.processor()]
    sources = [path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))]
    return hashlib.sha256("\0".join([*sources, *options, *processor]).encode()).hexdigest()[:16]
