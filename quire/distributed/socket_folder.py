"""The temporary folder of an engine's IPC sockets, needed while its processes connect."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "quire-ipc-"
LONGEST_PARENT = 79  # bytes: a socket's path has at most 107, and ours append PREFIX, eight letters and a name
SHORT_PARENT = Path("/tmp")


class SocketFolder:
    """Accessible to this user only: abstract sockets would be open to every user of the machine.

    A process that is killed during start-up leaves its folder behind. The next one removes it: a folder that is not
    locked is not in use.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > LONGEST_PARENT:
            parent = SHORT_PARENT
        _remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # removed as abandoned before it was locked
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if self.path.exists():
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or already removed
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
