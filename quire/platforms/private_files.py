"""Checks of folders that code or weights are loaded from: only this user and root may be able to write to them."""

import atexit
import functools
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PRIVATE_MODE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
REMEDY = "use a folder of your own that others cannot write to (chmod 700)"


class UntrustedPathError(OSError):
    """Another user could have written this file or folder."""


class PrivateFolder:
    """A checked folder, held open: files opened through it cannot be exchanged by renaming parts of its path."""

    def __init__(self, path: Path) -> None:
        """Creates the folder and its parents where missing. An UntrustedPathError says who could write to it."""
        self.path = Path(os.path.realpath(path))
        _require_safe_parents(self.path)
        _make(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _require_ours(os.fstat(self._fd), self.path)
        except UntrustedPathError:
            os.close(self._fd)
            raise

    def open(self, name: str) -> int | None:
        """A descriptor of a regular file that only this user or root can have written; None where there is none."""
        try:
            # Neither follow a link, nor wait for the writer of a pipe.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        try:
            _require_ours(os.fstat(fd), self.path / name)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UntrustedPathError(f"{self.path / name} is not a regular file")
        except UntrustedPathError:
            os.close(fd)
            raise
        return fd

    def put(self, name: str, source: Path) -> None:
        """Copy `source` here, atomically: another process may be looking for it."""
        unfinished = f".{name}.{secrets.token_hex(8)}"
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE, dir_fd=self._fd)
        try:
            with source.open("rb") as stream, open(fd, "wb") as target:
                shutil.copyfileobj(stream, target)
            os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> "PrivateFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def path_of(fd: int) -> Path:
    """A path by which other code opens the very file that was checked; an OSError there without /proc."""
    return Path(f"/proc/self/fd/{fd}")


def require_private_tree(path: Path) -> None:
    """PrivateFolder's check for everything inside as well: for caches that other libraries read by path."""
    with PrivateFolder(path) as folder:
        if not os.stat(folder.path).st_mode & 0o077:
            return  # no other user can enter
        for parent, folders, files in os.walk(folder.path):
            for name in (*folders, *files):
                entry = Path(parent, name)
                with suppress(FileNotFoundError):
                    _require_ours(os.lstat(entry), entry)


@functools.cache
def process_folder() -> Path:
    """A temporary folder of this process, removed at exit."""
    folder, owner = tempfile.mkdtemp(prefix="quire-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child inherits the exit handler
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def _make(path: Path) -> None:
    """mkdir with private parents: `parents=True` would create those with the default mode."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE_MODE)


def _require_safe_parents(path: Path) -> None:
    """Parent folders must belong to this user or root, who could replace the folder; others may write to them only if
    they are sticky, as /tmp is."""
    for folder in path.parents:
        try:
            found = os.stat(folder)
        except FileNotFoundError:
            continue  # will be created
        _require_owner(found, folder)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise UntrustedPathError(f"everyone can write to {folder}; {REMEDY}")


def _require_ours(found: os.stat_result, path: Path) -> None:
    _require_owner(found, path)
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedPathError(f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):o}); {REMEDY}")


def _require_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise UntrustedPathError(f"{path} belongs to another user (uid {found.st_uid}); {REMEDY}")
