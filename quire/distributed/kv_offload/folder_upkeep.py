"""Keeps a folder of KV-cache blocks within its size and free of what dead writers have left."""

import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("quire")

FOLDER_MODE = 0o700
WRITING = "writing-"  # prefix of the folder of one process
LOCK = "lock"
EVICT_LOCK = "evict.lock"
EVICT_TO = 0.9  # of the limit, so that it is not reached again at once
RESERVE = 0.02  # of the disk, which is never filled
LOOK_AFTER = 0.05  # of the limit; so much is written before all files are counted again: other engines write too
SUB_FOLDER, BLOCK_FILE = re.compile("[0-9a-f]{2}"), re.compile("[0-9a-f]{40,128}")  # all else is not ours
ABANDONED = 3600.0  # seconds after which a writer's files are left over, where locks tell nothing


class WriterFolder:
    """Holds the files that one process is writing. Its lock is the kernel's, and ends with the process."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{WRITING}{secrets.token_hex(8)}"
        # It gets its name once it is locked: no other process can take it for an abandoned one.
        unnamed = parent / f".{self.path.name}"
        unnamed.mkdir(mode=FOLDER_MODE)
        self._lock: int | None = None
        try:
            self._lock = os.open(unnamed / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            with suppress(OSError):  # a file system without locks: it is then told by its age
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path)
        except OSError:  # it is tried again with every block
            self.path = unnamed
            self.remove()
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


class FolderUpkeep:
    """One thread, at start-up and whenever a part of the limit has been written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._written = 0  # since the files were counted
        self._wake = threading.Event()
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="quire-kv-folder", daemon=True)

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def written(self, size: int) -> None:
        with self._lock:
            self._written += size
            if self._written > LOOK_AFTER * self.max_bytes:
                self._wake.set()

    def look(self) -> None:
        """Remove what is left over, then the files not used for longest if there is too much. Other engines may do the
        same, or read the files: one that is open stays readable until it is closed."""
        try:
            remove_abandoned(self.folder)
            with self._lock:
                self._written = 0
            self._evict()
        except OSError as error:
            logger.warning("KV cache on disk: the folder %s cannot be kept tidy: %s", self.folder, error)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._stopped:
                return
            self._wake.clear()
            self.look()

    def _evict(self) -> None:
        files = list(block_files(self.folder))
        total = sum(size for _, size, _ in files)
        disk = shutil.disk_usage(self.folder)
        limit = max(0.0, min(self.max_bytes, total + disk.free - RESERVE * disk.total))
        if total <= limit:
            return
        with _lock_for_eviction(self.folder) as locked:
            for _, size, path in sorted(files) if locked else ():
                if total <= EVICT_TO * limit or self._stopped:
                    break
                try:
                    os.unlink(path)
                    self.num_evicted += 1
                except FileNotFoundError:
                    pass  # another engine was faster
                except OSError:
                    continue  # somebody else's: others go instead
                total -= size


@contextmanager
def _lock_for_eviction(folder: Path) -> Iterator[bool]:
    """False if another engine is at it. Where there are no locks, at worst two engines evict, and too much is gone."""
    locked, lock = True, None
    try:
        lock = os.open(folder / EVICT_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        locked = False
    except OSError:
        pass
    try:
        yield locked
    finally:
        if lock is not None:
            os.close(lock)


def block_files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """(time of access, bytes, path) of every block that can be seen."""
    for sub in _folders(folder):
        if not SUB_FOLDER.fullmatch(sub.name):
            continue
        with suppress(OSError), os.scandir(sub.path) as entries:
            for entry in entries:
                if not (BLOCK_FILE.fullmatch(entry.name) and entry.name.startswith(sub.name)):
                    continue  # somebody else's
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_atime, found.st_size, entry.path


def remove_abandoned(folder: Path) -> None:
    """Folders of writers that have ended without removing them."""
    for sub in _folders(folder):
        if sub.name.startswith((WRITING, f".{WRITING}")) and _is_abandoned(Path(sub.path)):
            shutil.rmtree(sub.path, ignore_errors=True)


def _is_abandoned(writer: Path) -> bool:
    old = False
    try:
        old = time.time() - writer.stat().st_mtime > ABANDONED
        if writer.name.startswith("."):
            return old  # made and not locked yet, for a moment
        fd = os.open(writer / LOCK, os.O_RDWR)
    except OSError:
        return old
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True  # nobody else has it
    except BlockingIOError:
        return False
    except OSError:
        return old
    finally:
        os.close(fd)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
