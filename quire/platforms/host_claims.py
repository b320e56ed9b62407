"""Host memory that engines of this user are about to use. Page-locked memory takes long to allocate: an engine that
starts meanwhile would take for free what another has already promised to itself."""

import contextlib
import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.platforms import cpu_cgroup, cpu_facts

SHARE = 0.6  # of what were free without them is the most that all claims may take by default
_NUMBERS = struct.Struct("<QQ")  # a claim's file: its bytes, those of them that are used by now, the control group


def _shared_folder() -> Path:
    return Path("/dev/shm") / f"quire-host-memory-{os.getuid()}"


@dataclass(frozen=True)
class Claim:
    size: int
    used: int
    group: str


class HostClaims:
    """A file for each claim, locked while it is held: one that is not locked is of a process that was killed."""

    def __init__(self, folder: Path | None = None, group: str | None = None) -> None:
        self._folder = folder or _shared_folder()
        self._group = _membership() if group is None else group

    def free(self) -> int:
        """Bytes that this process can allocate and nobody has claimed."""
        with self._locked() as usable:
            claims = self._alive(usable)
        left = [free - sum(claim.size - claim.used for claim in among) for free, among in self._limits(claims)]
        return max(0, min(left))

    def share(self) -> int:
        """Bytes for an engine that was not told how many: half of what claims may take. So the first takes most,
        later ones find some too, and all together leave memory to what loads and serves models."""
        with self._locked() as usable:
            return self._share(usable)

    def take(self, size: int, shrinks: bool) -> "HeldClaim":
        """`shrinks`: no more than is this engine's share."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(0o700, exist_ok=True)
        with self._locked() as usable:
            granted = min(size, self._share(usable)) if shrinks else size
            descriptor = -1
            if usable:
                with contextlib.suppress(OSError):
                    descriptor, _ = tempfile.mkstemp(dir=self._folder)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    os.pwrite(descriptor, self._group.encode(), _NUMBERS.size)
            return HeldClaim(granted, descriptor)

    def _share(self, usable: bool) -> int:
        free = [
            SHARE * (free + sum(claim.used for claim in among)) - sum(claim.size for claim in among)
            for free, among in self._limits(self._alive(usable))
        ]
        return max(0, int(min(free) / 2))

    def _limits(self, claims: list[Claim]) -> list[tuple[int, list[Claim]]]:
        """Free bytes, and the claims that take of them: of the machine, and of this process's control group."""
        mine = [claim for claim in claims if claim.group == self._group]
        free = ((cpu_facts.machine_memory(), claims), (cpu_cgroup.memory_left(), mine))
        known = [(num_bytes, among) for num_bytes, among in free if num_bytes is not None]
        if not known:
            raise RuntimeError("cannot find out how much memory is free")
        return known

    def _alive(self, usable: bool) -> list[Claim]:
        found: list[Claim] = []
        if not usable:
            return found
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                with contextlib.suppress(OSError, struct.error):
                    found += _read(path)
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether there is a folder of this user's; else each engine is on its own."""
        folder = -1
        with contextlib.suppress(OSError):
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            usable = folder >= 0 and os.fstat(folder).st_uid == os.getuid()
            if usable:
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield usable
        finally:
            if folder >= 0:
                os.close(folder)


class HeldClaim:
    def __init__(self, size: int, descriptor: int) -> None:
        self.size = size
        self._descriptor = descriptor
        self.use(0)

    def use(self, num_bytes: int) -> None:
        """So many are allocated by now: the system does not count them as free any more."""
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, _NUMBERS.pack(self.size, min(num_bytes, self.size)), 0)

    def settle(self, num_bytes: int) -> None:
        """No more will be used than these."""
        self.size = num_bytes
        self.use(num_bytes)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)  # whoever looks next removes the file
            self._descriptor = -1


def _read(path: Path) -> list[Claim]:
    """Nothing where the file is left over, which is removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return []
    except BlockingIOError:
        text = os.pread(descriptor, 1 << 16, 0)
        size, used = _NUMBERS.unpack_from(text)
        return [Claim(size, used, text[_NUMBERS.size :].decode(errors="replace"))]
    finally:
        os.close(descriptor)


def _membership() -> str:
    try:
        return cpu_cgroup.MEMBERSHIP.read_text()
    except OSError:
        return ""
