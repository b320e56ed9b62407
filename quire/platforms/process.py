"""How a child process ends: with its parent, and only when its parent ends it."""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """No orphans: the kernel ends this process when the thread that started it is gone. `parent` is that thread's
    process, if this one was not started by multiprocessing."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    started_by = multiprocessing.parent_process()
    if parent is None and started_by is not None:
        parent = started_by.pid
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it ended before prctl


def leave_signals_to_parent() -> None:
    """A terminal's Ctrl-C, or a service manager's SIGTERM, may reach every process. Only the one that was started by
    hand may act on it, and tells the others: else an engine would be gone before its requests have ended."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
