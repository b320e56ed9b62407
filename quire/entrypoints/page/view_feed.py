"""Samples of the engine for everybody who watches: one call of the core for all watchers of a process."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.engine.async_engine import EngineDeadError
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import overloaded
from quire.entrypoints.page.latencies import Latencies
from quire.metrics.kinds import combined

INTERVAL = 0.1  # seconds between samples
LATENCY_INTERVAL = 1.0  # between percentiles
MAX_WATCHERS = 32  # of a process
MAX_BEHIND = 4  # samples that a slow watcher may have unread


class Watcher:
    """A client's events. One that does not keep up misses samples, and then gets the whole block map again."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.needs_map = True

    def offer(self, sample: bytes, with_map: bytes) -> None:
        if self.events.qsize() >= MAX_BEHIND:
            self.needs_map = True
        else:
            self.events.put_nowait(with_map if self.needs_map else sample)
            self.needs_map = False


class ViewFeed:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._latencies = Latencies()
        self._map = bytearray()

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events, until the client leaves, the server shuts down or the engine dies."""
        watcher = self._join()
        try:
            while (event := await watcher.events.get()) is not None:
                yield event
        finally:
            self._watchers.discard(watcher)

    def check_room(self) -> None:
        if len(self._watchers) >= MAX_WATCHERS:
            raise overloaded(f"{MAX_WATCHERS} clients are watching already", 5)

    def _join(self) -> Watcher:
        watcher = Watcher()
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return watcher

    async def _run(self) -> None:
        """Ends with the last watcher: nothing asks the core then, and it stops taking notes."""
        last_step, latency_due = 0, 0.0
        cursor: Sequence[int] = ()
        cause = "the server is shutting down"
        try:
            while self._watchers and not self._context.draining:
                began = time.monotonic()
                view = await self._context.engine.get_view(last_step, cursor)
                cursor = view["blocks"].pop("cursor")
                last_step = max([last_step, *(step[0] for step in view["steps"])])
                if began >= latency_due:
                    view["latency"], latency_due = await self._percentiles(began), began + LATENCY_INTERVAL
                self._send(view)
                await asyncio.sleep(max(0.0, INTERVAL - (time.monotonic() - began)))
        except EngineDeadError:
            cause = "the engine has died; the server's log holds the cause"
        except RuntimeError as error:  # stalled, or the call failed
            cause = str(error)
        for watcher in self._watchers:
            watcher.events.put_nowait(event({"reason": cause}, "end"))
            watcher.events.put_nowait(None)

    async def _percentiles(self, now: float) -> dict[str, Any]:
        others = await self._context.peers.metrics() or []
        return self._latencies.percentiles(now, combined([self._context.own_metrics(), *others]))

    def _send(self, view: dict[str, Any]) -> None:
        blocks = view["blocks"]
        states = blocks["states"]
        if len(self._map) != blocks["total"]:
            self._map = bytearray(blocks["total"])
        first = blocks["first"]
        unchanged = self._map[first : first + len(states)] == states
        self._map[first : first + len(states)] = states
        view["time"] = time.time()
        view["blocks"] = blocks | {"states": [] if unchanged else encoded(states)}
        sample = event(view)
        if any(watcher.needs_map for watcher in self._watchers):
            view["blocks"] = blocks | {"first": 0, "states": encoded(self._map)}
            with_map = event(view)
        else:
            with_map = sample
        for watcher in self._watchers:
            watcher.offer(sample, with_map)


def encoded(states: bytes | bytearray) -> str | list[int]:
    """Runs, as state and length in turn, or base64 where that is shorter."""
    array = np.frombuffer(bytes(states), np.uint8)
    starts = np.flatnonzero(np.diff(array, prepend=array[:1] + 1 if len(array) else 0))
    if 6 * len(starts) > len(array):
        return base64.b64encode(states).decode()
    runs = np.stack([array[starts].astype(np.int64), np.diff(starts, append=len(array))], axis=1)
    flat: list[int] = runs.reshape(-1).tolist()
    return flat


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
