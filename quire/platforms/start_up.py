"""Before torch is imported: what it reads of the environment, and what makes a process start sooner."""

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.config import environment


def set_torch_environment() -> None:
    """In a process that runs an engine beside front ends."""
    # libgomp's threads would spin for milliseconds between operations on cores that front ends need; sleeping at once
    # costs a single request a third of its speed. docs/performance.md has the figures.
    if not environment.OMP_WAIT_POLICY.is_set():
        environment.GOMP_SPINCOUNT.set_default()
    # torch and oneDNN each keep 1024 compiled matrix products, one for every number of rows: a gigabyte that fills up
    # over minutes of mixed traffic. What is thrown away here is made again in half a millisecond.
    environment.LRU_CACHE_CAPACITY.set_default()
    environment.ONEDNN_PRIMITIVE_CACHE_CAPACITY.set_default()


@contextmanager
def collector_paused() -> Iterator[None]:
    """While modules are imported and vocabularies read, which make a million objects that stay: the garbage collector
    would visit all of them again and again, for a sixth of the time that importing torch takes."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # a program that has frozen objects means them to stay so
            # Together these make all objects old ones without a visit; the next collection of young ones skips them.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def start_loading_torch() -> None:
    """Load torch's main library in a thread, if torch is still to be imported, which then finds it loaded: an eighth of
    a second for which Python's lock is not needed. Whatever other libraries are loaded meanwhile wait for it.

    The libraries and their order are those of torch's own start. Where one cannot be loaded torch reports it.
    """
    if "torch" in sys.modules or sys.platform != "linux":
        return
    try:
        found = importlib.util.find_spec("torch")
        load = ctypes.CDLL(None).dlopen  # unlike CDLL(path), a function of a CDLL runs without Python's lock
    except (ImportError, ValueError, OSError, AttributeError):
        return
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent / "lib"
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def run() -> None:
        if load(bytes(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
            load(bytes(folder / "libtorch_cpu.so"), os.RTLD_NOW)

    # Not a daemon: a process that ends at once has to wait until constructors of the library have run.
    threading.Thread(target=run, name="quire-torch").start()
