"""How ranks meet: each says what it is, the first checks that all are there and alike, and all get its verdict."""

import errno
import importlib
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from quire.distributed.layout import WorldLayout
from quire.distributed.machine import machine_id

LINGER = 5.0  # seconds that the first rank, which may hold the store, stays for others to read its verdict
LAST_MOMENTS = 1000  # milliseconds from a closed connection until a process has ended


@dataclass(frozen=True)
class Meeting:
    """All ranks, which have met; and where they leave each other notes."""

    store: dist.Store
    introductions: list[dict[str, Any]]  # by rank

    def find_gone(self, ranks: Sequence[int]) -> list[str]:
        """Names of those, of this machine, whose processes have ended. Who is on the way out is waited for: its
        connections close first."""
        here, poll = machine_id(), select.poll()
        gone, opened = set(), {}
        for rank in ranks:
            if self.introductions[rank]["machine"] == here:
                try:
                    opened[os.pidfd_open(self.introductions[rank]["pid"])] = rank
                except ProcessLookupError:
                    gone.add(rank)
        for fd in opened:
            poll.register(fd, select.POLLIN)
        gone.update(opened[fd] for fd, _ in poll.poll(0 if gone else LAST_MOMENTS))
        for fd in opened:
            os.close(fd)
        return [f"rank {rank} (process {self.introductions[rank]['pid']})" for rank in sorted(gone)]


def meet(rank: int, layout: WorldLayout, address: str, backend: str, timeout: float) -> Meeting:
    """Within `timeout` seconds, or a RuntimeError on every rank that came, with the numbers of those that did not."""
    end = time.monotonic() + timeout
    store = _store(rank, layout.size, address, timeout)
    mine = {
        "version": version(),
        "layout": asdict(layout),
        "backend": backend,
        "pid": os.getpid(),
        "machine": machine_id(),
    }
    store.set(f"rank/{rank}", json.dumps(mine))
    if rank == 0:
        verdict = _check(store, layout.size, end)
        store.set("verdict", json.dumps(verdict))
        _linger(store, layout.size)
    else:
        try:
            store.wait(["verdict"], timedelta(seconds=timeout + LINGER))
            verdict = json.loads(store.get("verdict"))
        except RuntimeError as error:
            raise RuntimeError(f"rank 0 at {address} has ended before all ranks met: {error}") from error
        store.set(f"read/{rank}", "")
        if not isinstance(verdict, str) and (problem := _differs(verdict[0], rank, mine)):
            verdict = problem
    if isinstance(verdict, str):
        raise RuntimeError(verdict)
    return Meeting(store, verdict)


def version() -> str:
    """Of the code that runs here."""
    return f"{importlib.import_module(__name__.partition('.')[0]).__version__} with torch {torch.__version__}"


def _store(rank: int, size: int, address: str, timeout: float) -> dist.Store:
    url = urlsplit(address)
    limit = timedelta(seconds=timeout)
    if url.scheme == "file" and url.path:
        return dist.FileStore(url.path, size)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError(f"ranks cannot meet at {address!r}; allowed: tcp://HOST:PORT, file:///PATH")
    try:
        if rank == 0:
            return _listening_store(url.hostname, url.port, size, limit)
        return dist.TCPStore(url.hostname, url.port, size, False, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        if rank:
            raise RuntimeError(
                f"rank 0 did not open {address} within {timeout:g} seconds: it has not started, or another process "
                f"has the port ({error})"
            ) from error
        if getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error):
            raise ValueError(f"port {url.port} of {url.hostname} is in use; give another one") from error
        raise ValueError(f"ranks cannot meet at {address}: {error}") from error


def _listening_store(host: str, port: int, size: int, limit: timedelta) -> dist.Store:
    """At that address alone: torch's own socket would listen at all of this machine."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.listen(max(size, 128))
        fd = os.dup(server.fileno())  # torch closes it
    return dist.TCPStore(host, port, size, True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)


def _check(store: dist.Store, size: int, end: float) -> list[dict[str, Any]] | str:
    """Every rank's introduction, or what is wrong."""
    found: list[dict[str, Any]] = []
    for rank in range(size):
        try:
            store.wait([f"rank/{rank}"], timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError:
            missing = [each for each in range(size) if not store.check([f"rank/{each}"])]
            those = "rank" if len(missing) == 1 else "ranks"
            return f"{those} {', '.join(map(str, missing))} of {size} did not join within the time limit"
        found.append(json.loads(store.get(f"rank/{rank}")))
    problems = [_differs(found[0], rank, each) for rank, each in enumerate(found)]
    return next(filter(None, problems), None) or found


def _differs(first: dict[str, Any], rank: int, other: dict[str, Any]) -> str | None:
    for name in ("version", "layout", "backend"):
        if first[name] != other[name]:
            return f"rank 0 has {name} {_text(first[name])}, rank {rank} has {_text(other[name])}; all must be the same"
    return None


def _text(value: object) -> str:
    return " x ".join(f"{name} {size}" for name, size in value.items()) if isinstance(value, dict) else str(value)


def _linger(store: dist.Store, size: int) -> None:
    present = [rank for rank in range(1, size) if store.check([f"rank/{rank}"])]
    end = time.monotonic() + LINGER
    for rank in present:
        try:
            store.wait([f"read/{rank}"], timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError:
            return
