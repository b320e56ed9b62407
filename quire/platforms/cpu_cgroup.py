"""CPU and memory limits of this process's control groups: its own group's, or a parent's."""

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time, as "1.5"; None where there is no limit."""
    quotas = [_quota(group) for group in groups("cpu", mount, membership)]
    return min((q for q in quotas if q is not None), default=None)


def memory_left(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes until the nearest limit; None where there is none."""
    left = [_left(group) for group in groups("memory", mount, membership)]
    return min((bytes for bytes in left if bytes is not None), default=None)


def groups(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """Folders of the groups that limit this process, its own first, then the parents'.

    In a container the file may name a path that exists only outside; then the groups that do exist are used.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            roots = [mount, mount / "unified"]
        elif controller in names.split(","):
            roots = [mount / names, mount / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            for depth in range(len(parts), -1, -1):
                group = root.joinpath(*parts[:depth])
                if group.is_dir():
                    yield group


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None  # "max" is no number, -1 no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _left(group: Path) -> int | None:
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            left = int((group / limit).read_text()) - int((group / usage).read_text())  # "max" is no number: no limit
            return max(0, left + _reclaimable(group))
        except (OSError, ValueError):
            continue
    return None


def _reclaimable(group: Path) -> int:
    """Page cache counts as usage but is reclaimed on demand."""
    try:
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(stats.get(f"total_{kind}") or stats.get(kind) or 0) for kind in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0
