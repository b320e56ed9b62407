"""Which adapters are in host memory and in slots of the device, and which requests wait for theirs.

The core's side of lora/adapters.py, without torch. An adapter that a request waits for or uses is held; the others make
room for those that are wanted, the least recently used first. One that is on disk waits until host memory has room, or
until no other is on its way to a slot. If all slots are held, the adapter that has had its slot longest gets no new
requests until it has made room: traffic for some adapters never keeps out the others.
"""

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from quire.messages.lora import AdapterNews, AdapterStats, LoRARequest

MAX_FAILURES = 1000  # that are remembered


class Place(enum.IntEnum):
    DISK = 0
    READING = 1  # into host memory
    HOST = 2
    COPYING = 3  # into its slot
    SLOT = 4


class AdapterWorkers(Protocol):
    """What an executor does for adapters; see executor/base.py."""

    def load_adapter(self, request: LoRARequest) -> None: ...

    def place_adapter(self, lora_id: int, slot: int) -> None: ...

    def use_adapter(self, lora_id: int, slot: int) -> None: ...

    def drop_adapter(self, lora_id: int) -> None: ...

    def adapter_news(self) -> list[AdapterNews]: ...


@dataclass
class Entry:
    request: LoRARequest
    place: Place = Place.DISK
    content: bytes = b""
    slot: int = -1
    used: int = 0  # when it was last, by count
    placed: int = 0  # when it got its slot
    pinned: bool = False
    draining: bool = False  # it gives up its slot once no request holds it
    holders: set[str] = field(default_factory=set)  # requests that may run, or do
    waiting: list[str] = field(default_factory=list)  # requests that may not yet

    @property
    def moving(self) -> bool:
        return self.place in (Place.READING, Place.COPYING)

    @property
    def idle(self) -> bool:
        return not self.holders and not self.waiting and not self.pinned


@dataclass(frozen=True)
class Change:
    """Requests that may run now, with the content of their adapter; and those whose adapter could not be loaded."""

    ready: list[tuple[str, bytes]]
    failed: list[tuple[str, str]]  # and why


class Residency:
    def __init__(self, workers: AdapterWorkers, max_loras: int, num_host: int) -> None:
        self._workers = workers
        self._max_loras, self._num_host = max_loras, num_host
        self._entries: dict[int, Entry] = {}
        self._of_request: dict[str, Entry] = {}
        self._free = list(reversed(range(max_loras)))
        self._unread: deque[Entry] = deque()  # on disk, until host memory has room
        self._wanting: deque[Entry] = deque()  # in host memory, with requests that wait for a slot
        self._clock = itertools.count(1)
        self._moving: set[int] = set()
        self._ready: list[tuple[str, bytes]] = []
        self._failures: dict[int, str] = {}  # why an adapter could not be loaded, until it is tried again
        self._num_loads = self._num_placed = self._num_evicted = 0

    @property
    def pending(self) -> bool:
        """Whether `poll` may have something to tell, now or soon."""
        return bool(self._moving or self._ready)

    def hold(self, request_id: str, lora: LoRARequest) -> bytes | None:
        """For a new request: the content of its adapter if it may run at once. ValueError if the number is taken."""
        entry = self._known(lora)
        self._of_request[request_id] = entry
        if entry.place == Place.SLOT and not entry.draining:
            entry.holders.add(request_id)
            return entry.content
        entry.waiting.append(request_id)
        self._want(entry)
        self._assign()
        return None

    def add(self, lora: LoRARequest) -> Entry:
        """Known from now on, and loaded. ValueError if it is to be loaded anew and cannot be."""
        entry = self._entries.get(lora.lora_int_id)
        if entry is not None and lora.load_inplace and not (entry.idle and not entry.moving):
            raise ValueError(
                f"adapter {entry.request.lora_name!r} is in use, pinned or being loaded; load it anew when it is not"
            )
        entry = self._known(lora)
        if entry.place == Place.DISK:  # at once: who asks for it may be the one that makes steps
            self._evict_from_host(1)
            self._load(entry)
        return entry

    def _known(self, lora: LoRARequest) -> Entry:
        """Its entry; a new one if there is none, or if it is to be loaded anew and no request has it."""
        entry = self._entries.get(lora.lora_int_id)
        if entry is not None and lora.load_inplace and entry.idle and not entry.moving:
            self._forget(entry)
            entry = None
        if entry is None:
            entry = self._entries[lora.lora_int_id] = Entry(lora)
            self._unread.append(entry)
            self._failures.pop(lora.lora_int_id, None)
        elif (entry.request.lora_name, entry.request.lora_path) != (lora.lora_name, lora.lora_path):
            there = entry.request
            raise ValueError(
                f"lora_int_id {lora.lora_int_id} is adapter {there.lora_name!r} at {there.lora_path!r}; give "
                f"{lora.lora_name!r} another number, or remove that one first"
            )
        entry.used = next(self._clock)
        return entry

    def release(self, request_id: str) -> None:
        """The request has ended."""
        entry = self._of_request.pop(request_id, None)
        if entry is None:
            return
        if request_id in entry.holders:
            entry.holders.remove(request_id)
            self._ready = [one for one in self._ready if one[0] != request_id]
        if request_id in entry.waiting:
            entry.waiting.remove(request_id)
        entry.used = next(self._clock)
        if entry.place == Place.DISK and entry.idle:
            self._forget(entry)
        self._assign()

    def poll(self) -> Change:
        """What has changed since the last call."""
        failed: list[tuple[str, str]] = []
        for news in self._workers.adapter_news():
            entry = self._entries.get(news.lora_id)
            assert entry is not None and entry.moving
            self._moving.discard(news.lora_id)
            if news.error is not None:  # of a file that cannot be used; a copy does not fail
                failed += [(request_id, news.error) for request_id in entry.waiting]
                self._failures[news.lora_id] = news.error
                if len(self._failures) > MAX_FAILURES:
                    del self._failures[next(iter(self._failures))]
                self._forget(entry)
            elif news.slot is None:
                entry.place, entry.content = Place.HOST, news.content
                self._want(entry)
            else:
                self._workers.use_adapter(news.lora_id, news.slot)
                entry.place, entry.placed = Place.SLOT, next(self._clock)
                self._admit(entry)
        self._assign()
        self._evict_from_host()
        ready, self._ready = self._ready, []
        return Change(ready, failed)

    def remove(self, lora_id: int) -> bool:
        """Forget an adapter; False if it is not known. ValueError while requests use it or wait for it."""
        entry = self._entries.get(lora_id)
        if entry is None:
            return False
        if count := len(entry.holders) + len(entry.waiting):
            raise ValueError(
                f"adapter {entry.request.lora_name!r} is in use by {count} requests; remove it when they have ended"
            )
        if entry.moving:
            raise ValueError(f"adapter {entry.request.lora_name!r} is being loaded; remove it when that is done")
        self._forget(entry)
        self._assign()  # a pinned one's slot may be wanted
        return True

    def pin(self, lora_id: int) -> bool:
        """Keep its slot, or host memory until it has one."""
        entry = self._entries.get(lora_id)
        if entry is None:
            raise ValueError(f"adapter {lora_id} is not loaded; loaded: {sorted(self._entries)}")
        others = sum(other.pinned for other in self._entries.values() if other is not entry)
        if others + 1 >= self._max_loras:
            raise ValueError(f"{others} adapters are pinned; of max_loras {self._max_loras} one slot must stay free")
        entry.pinned = True
        if entry.place == Place.SLOT:
            entry.draining = False
            self._admit(entry)
        self._want(entry)
        self._assign()
        return True

    def is_loaded(self, lora_id: int) -> bool:
        """Whether one that was added has been read, though others may have taken its place since. ValueError if it
        could not be."""
        if lora_id in self._failures:
            raise ValueError(self._failures[lora_id])
        return lora_id not in self._entries or bool(self._entries[lora_id].content)

    def loaded(self) -> list[int]:
        return sorted(number for number, entry in self._entries.items() if entry.place >= Place.HOST)

    def stats(self) -> AdapterStats:
        entries = self._entries.values()
        return AdapterStats(
            self._max_loras,
            tuple(sorted(entry.request.lora_name for entry in entries if entry.holders)),
            tuple(sorted(entry.request.lora_name for entry in entries if entry.waiting)),
            sum(entry.place >= Place.HOST for entry in entries),
            sum(entry.place == Place.SLOT for entry in entries),
            self._num_loads,
            self._num_placed,
            self._num_evicted,
        )

    def _want(self, entry: Entry) -> None:
        if entry.place == Place.HOST and (entry.waiting or entry.pinned) and entry not in self._wanting:
            self._wanting.append(entry)

    def _admit(self, entry: Entry) -> None:
        self._ready += [(request_id, entry.content) for request_id in entry.waiting]
        entry.holders.update(entry.waiting)
        entry.waiting = []

    def _assign(self) -> None:
        """Slots to those that want one, in order."""
        self._wanting = deque(entry for entry in self._wanting if entry.waiting or entry.pinned)
        while self._wanting and (slot := self._free.pop() if self._free else self._evict()) is not None:
            entry = self._wanting.popleft()
            entry.place, entry.slot = Place.COPYING, slot
            self._num_placed += 1
            self._moving.add(entry.request.lora_int_id)
            self._workers.place_adapter(entry.request.lora_int_id, slot)
        self._drain()
        self._read()

    def _read(self) -> None:
        """Those on disk, in order, while there is room; one even without, if no other is on its way to a slot."""
        while self._unread:
            self._evict_from_host(1)
            places = [entry.place for entry in self._entries.values()]
            full = sum(place != Place.DISK for place in places) >= self._num_host
            if full and (self._wanting or Place.READING in places):
                return
            self._load(self._unread[0])

    def _load(self, entry: Entry) -> None:
        self._unread.remove(entry)
        entry.place = Place.READING
        self._num_loads += 1
        self._moving.add(entry.request.lora_int_id)
        self._workers.load_adapter(entry.request)

    def _drain(self) -> None:
        """As many make room as adapters want a slot."""
        held = [entry for entry in self._entries.values() if entry.place == Place.SLOT]
        missing = len(self._wanting) - sum(entry.draining for entry in held)
        for entry in sorted((e for e in held if not e.draining and not e.pinned), key=lambda e: e.placed):
            if missing > 0:
                entry.draining = True
                missing -= 1
        if not self._wanting:
            for entry in held:
                entry.draining = False
                self._admit(entry)

    def _evict(self) -> int | None:
        """The slot of the least recently used adapter that no request uses; None if all are used."""
        idle = [e for e in self._entries.values() if e.place == Place.SLOT and not e.holders and not e.pinned]
        if not idle:
            return None
        entry = min(idle, key=lambda e: (not e.draining, e.used))
        slot, entry.slot = entry.slot, -1
        entry.place, entry.draining = Place.HOST, False
        self._num_evicted += 1
        if self._unread and entry.waiting:  # behind those on disk, which it would keep out of host memory
            self._workers.drop_adapter(entry.request.lora_int_id)
            entry.place = Place.DISK
            self._unread.append(entry)
        self._want(entry)
        return slot

    def _evict_from_host(self, room: int = 0) -> None:
        """The least recently used, until `room` more fit or requests have all that is left."""
        kept = [e for e in self._entries.values() if e.place != Place.DISK]
        spare = sorted((e for e in kept if e.place == Place.HOST and e.idle), key=lambda e: e.used)
        for entry in spare[: max(0, len(kept) + room - self._num_host)]:
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        if entry.place in (Place.COPYING, Place.SLOT):
            self._free.append(entry.slot)
        for request_id in (*entry.waiting, *entry.holders):
            self._of_request.pop(request_id, None)
        for queue in (self._wanting, self._unread):
            if entry in queue:
                queue.remove(entry)
        self._workers.drop_adapter(entry.request.lora_int_id)
        del self._entries[entry.request.lora_int_id]
