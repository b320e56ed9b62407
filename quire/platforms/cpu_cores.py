"""The choice of cores: as many as this process may use, on as few NUMA nodes as possible."""

import contextlib
import ctypes
import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.platforms.cpu_cgroup import cpu_quota

CPUS = Path("/sys/devices/system/cpu")


class Core(NamedTuple):
    """A physical core."""

    node: int
    cpus: tuple[int, ...]  # its hardware threads that this process may run on


def usable_cores() -> int:
    """Physical cores this process may run on, within the quota of its control groups."""
    return within_quota(len(physical_cores()), cpu_quota())


def within_quota(cores: int, quota: float | None) -> int:
    """Whole cores: a thread that is throttled makes all others wait."""
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpus_of_process() -> set[int]:
    """Those of its main thread, which is never pinned to one."""
    return os.sched_getaffinity(os.getpid()) if hasattr(os, "sched_getaffinity") else allowed_cpus()


def physical_cores(folder: Path = CPUS, allowed: set[int] | None = None) -> list[Core]:
    """Those this process may run on, by their first CPU's number."""
    found: dict[str, tuple[int, list[int]]] = {}
    for cpu in sorted(allowed_cpus() if allowed is None else allowed):
        found.setdefault(_siblings(folder, cpu), (_node(folder, cpu), []))[1].append(cpu)
    return [Core(node, tuple(cpus)) for node, cpus in found.values()]


def choose_threads(requested: int | None) -> int:
    """`cpu_threads`, or the default; ValueError for more than there are CPUs."""
    if requested is None:
        return usable_cores()
    count = len(allowed_cpus())
    if not 1 <= requested <= count:
        raise ValueError(f"cpu_threads is {requested}; this process may use {count} CPUs: allowed: 1 to {count}")
    return requested


def choose_cores(cores: Sequence[Core], threads: int) -> list[Core]:
    """A core for each thread, all on the smallest node that has as many, else on the largest nodes."""
    sizes = Counter(core.node for core in cores)
    enough = [node for node, size in sizes.items() if size >= threads]
    if enough:
        order = [min(enough, key=lambda node: (sizes[node], node))]
    else:
        order = sorted(sizes, key=lambda node: (-sizes[node], node))
    return [core for node in order for core in cores if core.node == node][:threads]


def stay_on_nodes(cores: Sequence[Core], chosen: Sequence[Core]) -> str | None:
    """Keep this thread, those it will start and their memory on the nodes of `chosen`. Returns a note to log.

    Does nothing if those are all nodes.
    """
    nodes = sorted({core.node for core in chosen})
    if nodes == sorted({core.node for core in cores}):
        return None
    os.sched_setaffinity(0, {cpu for core in cores if core.node in nodes for cpu in core.cpus})
    near = len(nodes) == 1 and _prefer_memory_of(nodes[0])
    return f"computing on NUMA node {', '.join(map(str, nodes))}" + (", with its memory" if near else "")


class Claim:
    """The exclusive right to pin threads to `cpus`: a second engine pinned to the same cores would share each with the
    first instead of using idle ones. Released with the object or the process."""

    def __init__(self, cpus: Sequence[int]) -> None:
        # An abstract socket name, outside the file system: nothing to clean up.
        name = f"\0quire-cpus-{os.getuid()}-{','.join(map(str, cpus))}"[:100]
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(name)
            self.granted = True
        except OSError:
            self.granted = False

    def __del__(self) -> None:
        self._socket.close()


def _siblings(folder: Path, cpu: int) -> str:
    """A name for the physical core that `cpu` is a thread of."""
    try:
        return (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _node(folder: Path, cpu: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for entry in (folder / f"cpu{cpu}").glob("node[0-9]*"):
            return int(entry.name.removeprefix("node"))
    return 0


def _prefer_memory_of(node: int) -> bool:
    """New pages of this thread, and of those it starts, come from `node` while it has any."""
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if number is None or node >= 64:
        return False
    mask = ctypes.c_ulong(1 << node)
    preferred = 1
    call = ctypes.CDLL(None).syscall
    return call(ctypes.c_long(number), ctypes.c_int(preferred), ctypes.byref(mask), ctypes.c_ulong(65)) == 0
