"""This process's own resources, named as Prometheus' client libraries name them; from /proc, so only on Linux."""

import contextlib
import os
import resource
from pathlib import Path

from quire.metrics.kinds import Counter, Gauge, Metric

PROCESS_HELP = {
    "process_virtual_memory_bytes": "Virtual memory of the API process.",
    "process_resident_memory_bytes": "Resident memory of the API process.",
    "process_start_time_seconds": "When the API process was started, in seconds since 1970.",
    "process_cpu_seconds": "User and system time of the API process.",
    "process_open_fds": "Open file descriptors of the API process.",
    "process_max_fds": "Most file descriptors the API process may open.",
}


def process_metrics() -> list[Metric]:
    """Empty where there is no /proc."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may itself hold spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        user, system, started, virtual, pages = (int(fields[i]) for i in (11, 12, 19, 20, 21))
        ticks = os.sysconf("SC_CLK_TCK")
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return [
            Gauge("process_virtual_memory_bytes", {}, virtual),
            Gauge("process_resident_memory_bytes", {}, pages * os.sysconf("SC_PAGE_SIZE")),
            Gauge("process_start_time_seconds", {}, int(booted.split()[1]) + started / ticks),
            Counter("process_cpu_seconds", {}, (user + system) / ticks),
            Gauge("process_open_fds", {}, len(os.listdir("/proc/self/fd"))),
            Gauge("process_max_fds", {}, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ]
    return []
