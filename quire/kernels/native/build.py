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
from pathlib import Path

logger = logging.getLogger("quire")

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
TIMEOUT = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where there is no compiler, or its product does not load: the torch twins serve then."""
    compiler = next(filter(None, (shutil.which(name) for name in ("cc", "gcc", "clang"))), None)
    if platform.system() != "Linux" or os.environ.get("QUIRE_NATIVE_KERNELS") == "0":
        return None
    try:
        path = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
        if not path.exists():
            if compiler is None:
                return None
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no native CPU kernels, plain torch instead: %s", error)
        return None


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, product = f"{folder}/kernels.o", f"{folder}/kernels.so"
        _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", made)
        # Without -fopenmp: its calls bind to the libgomp that torch has loaded, and to that one's threads.
        _run(compiler, "-shared", "-o", product, made, "-lm")
        os.replace(product, path)  # at once: another process may be looking for it


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise OSError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-500:]}")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "quire"


def _fingerprint(compiler: str | None) -> str:
    """Of the source, the flags and the processor."""
    try:
        facts = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        processor = [line for line in facts.splitlines() if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        processor = [platform.processor()]
    parts = [SOURCE.read_text(), *FLAGS, *processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
