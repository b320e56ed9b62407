"""How a child process ends: with its parent, and only when its parent ends it."""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """No orphans: the kernel ends this process when the one that started it is gone."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it ended before prctl


def leave_signals_to_parent() -> None:
    """A terminal's Ctrl-C, or a service manager's SIGTERM, may reach every process. Only the one that was started by
    hand may act on it, and tells the others: else an engine would be gone before its requests have ended."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
