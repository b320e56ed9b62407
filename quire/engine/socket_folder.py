"""The folder through which processes of an engine find each other's sockets while they start."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "quire-ipc-"
LONGEST_PARENT = 79  # a socket's path has at most 107 bytes, and ours end in PREFIX, eight letters and a name
SHORT_PARENT = Path("/tmp")


class SocketFolder:
    """Of this user alone: sockets without a file would be open to every user of the machine.

    A process that is killed while it starts leaves its folder behind. The next one removes it: a folder whose lock
    nobody holds belongs to nobody.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > LONGEST_PARENT:
            parent = SHORT_PARENT
        _remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if self.path.exists():  # nobody took it for abandoned before it was locked
                return
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, another user's, or gone by now
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
