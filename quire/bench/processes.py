"""A server's processes, observed from outside on Linux: roles, memory, CPU time."""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    pid: int
    role: str  # "api" or "engine"

    def cpu_seconds(self) -> float:
        """User and system time so far; 0 after its exit."""
        try:
            after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(after_name[11]) + int(after_name[12])) / TICKS

    def resident_bytes(self) -> int:
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE
        except OSError:
            return 0


def server_processes(pid: int) -> list[Process]:
    """The process and its descendants, with their roles. The front end never imports torch, so a process that maps it
    is an engine."""
    if not Path("/proc/self/stat").exists():
        raise ValueError("processes can only be observed on Linux")
    found: list[Process] = []
    pending = [pid]
    while pending:
        one = pending.pop(0)
        try:
            command = Path(f"/proc/{one}/cmdline").read_bytes()
            mapped = Path(f"/proc/{one}/maps").read_text()
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        pending += map(int, children)
        if b"resource_tracker" not in command:
            found.append(Process(one, "engine" if "libtorch" in mapped else "api"))
    return found


def cpu_seconds(processes: list[Process], role: str) -> float:
    return sum(process.cpu_seconds() for process in processes if process.role == role)
