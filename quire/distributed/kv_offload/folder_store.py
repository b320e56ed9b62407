"""KV-cache blocks as files of a folder, which several engines may share: the disk tier."""

import errno
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.distributed.kv_offload.block_file import BlockFiles, CorruptBlockError
from quire.distributed.kv_offload.block_store import Buffer, StoreStats
from quire.distributed.kv_offload.folder_upkeep import FOLDER_MODE, FolderUpkeep, WriterFolder
from quire.distributed.kv_offload.io_pool import CLOSE_SECONDS
from quire.platforms.private_files import WRITABLE_BY_OTHERS

logger = logging.getLogger("quire")

NEVER_READABLE = (errno.EACCES, errno.EIO)  # such a file would be found again by every lookup, and fail every load
TOUCH_AFTER = 60.0  # seconds; a file's time of access is written again only if it is older


class FolderStore:
    """A block's file is named by its key: `ab/abcdef...`. It is written under another name and renamed, so that a file
    that can be found is whole; what a crash of the machine leaves of one is told by its checksum."""

    def __init__(self, folder: Path, max_bytes: int, direct: bool = True, tidies: bool = True) -> None:
        """The folder and its parents are created. A ValueError says why it cannot be used; one that can only be read
        is used for reading. `tidies`: evicts, and removes what dead writers have left; one of an engine's must."""
        self.stats = StoreStats()
        self._folder = folder
        self._files = BlockFiles(direct)
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        _make(folder)
        self._writer: WriterFolder | None = None
        self._upkeep = FolderUpkeep(folder, max_bytes) if tidies else None
        if self._upkeep is not None:
            self._upkeep.start()

    def register_buffers(self, memory: Buffer) -> None: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self.stats.timed(self.stats.lookups, len(keys)):
            found = [self._is_there(key) for key in keys]
        self.stats.add(self.stats.lookups, hits=sum(found))
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        with self.stats.timed(self.stats.reads, len(keys)):
            found = [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        read = sum(len(buffer) for hit, buffer in zip(found, buffers, strict=True) if hit)
        self.stats.add(self.stats.reads, hits=sum(found), bytes=read)
        return found

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        with self.stats.timed(self.stats.writes, len(keys)):
            kept = [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        self.stats.add(self.stats.writes, hits=sum(kept))
        return kept

    def close(self) -> None:
        """A file system that hangs is left to this thread, which ends with the process."""
        closing = threading.Thread(target=self._close, name="quire-kv-folder-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.stop()
        with self._lock:
            if self._writer is not None:
                self._writer.remove()
                self._writer = None

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _is_there(self, key: bytes) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.path_of(key), follow_symlinks=False).st_mode)
        except OSError:
            return False

    def _read(self, key: bytes, buffer: Buffer) -> bool:
        path = self.path_of(key)
        try:
            self._files.read(path, key, buffer)
        except FileNotFoundError:
            return False
        except CorruptBlockError as error:
            with suppress(OSError):
                path.unlink()
            self._failed("a block's file is damaged, is removed, and will be computed again", error)
            self.stats.add(self.stats.reads, errors=1)
            return False
        except OSError as error:
            if error.errno in NEVER_READABLE:
                with suppress(OSError):
                    path.unlink()
            self._failed("a block cannot be read", error)
            self.stats.add(self.stats.reads, errors=1)
            return False
        self._touch(path)
        return True

    def _touch(self, path: Path) -> None:
        """Eviction is by time of access, which many file systems do not keep by themselves."""
        with suppress(OSError):
            found = path.stat()
            if time.time() - found.st_atime > TOUCH_AFTER:
                os.utime(path, (time.time(), found.st_mtime))

    def _write(self, key: bytes, buffer: Buffer) -> bool:
        path = self.path_of(key)
        if self._is_there(key):
            self._touch(path)
            return True
        unfinished: Path | None = None
        try:
            unfinished = self._writing() / secrets.token_hex(16)
            size = self._files.write(unfinished, key, buffer)
            try:
                os.rename(unfinished, path)
            except FileNotFoundError:  # the first of its sub-folder
                with suppress(FileExistsError):
                    path.parent.mkdir(mode=FOLDER_MODE)
                os.rename(unfinished, path)
        except OSError as error:
            if unfinished is not None:
                with suppress(OSError):
                    unfinished.unlink()
            self._failed("blocks cannot be written and are kept nowhere", error)
            self.stats.add(self.stats.writes, errors=1)
            return False
        self.stats.add(self.stats.writes, bytes=len(buffer))
        if self._upkeep is not None:
            self._upkeep.written(size)
        return True

    def _writing(self) -> Path:
        """Where this process writes files; made at the first write, since a folder may be for reading only, and again
        if somebody has removed it, or all."""
        with self._lock:
            if self._writer is not None and not self._writer.path.exists():
                self._writer.remove()
                self._writer = None
            if self._writer is None:
                try:
                    _make(self._folder)
                except ValueError as error:
                    raise OSError(str(error)) from None
                self._writer = WriterFolder(self._folder)
            return self._writer.path

    def _failed(self, what: str, error: OSError) -> None:
        """Each kind of trouble is logged once; all of it is counted."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("KV cache on disk: %s (%s); said once, and counted in the metrics", what, error)


def _make(folder: Path) -> None:
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            with suppress(FileExistsError):
                path.mkdir(mode=FOLDER_MODE)
        found = folder.stat()
    except OSError as error:
        raise ValueError(f"the folder {folder} for the KV cache cannot be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{folder} is to hold the KV cache, and is no folder")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & WRITABLE_BY_OTHERS:
        raise ValueError(
            f"other users can write to {folder}, and so could change what models read from it; use a folder of your "
            "own (chmod 700)"
        )
