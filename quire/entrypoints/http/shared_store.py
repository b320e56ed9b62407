"""Documents that outlive their requests, such as responses: in memory, bounded, and once per server.

With several API processes the supervisor has the store, and they send it these calls (`RemotePeers.call`).
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from quire.config.server import ServerConfig

OVERHEAD = 512  # bytes that a document takes beside its own
MAX_FOLLOWED, MAX_FOLLOWED_BYTES = 1024, 1 << 20  # events of one result: a reader asks for more once it has sent them
WAIT_SECONDS = 15.0  # a reader that has waited this long asks again


class Put(msgspec.Struct, tag=True):
    """Store a `new` document, or replace one that is not `final`. A final one stays as it is."""

    owner: bytes
    id: str
    data: bytes
    final: bool
    new: bool


class Append(msgspec.Struct, tag=True):
    """Add events to a document that is not final."""

    owner: bytes
    id: str
    events: list[bytes]


class Get(msgspec.Struct, tag=True):
    owner: bytes
    id: str


class Delete(msgspec.Struct, tag=True):
    owner: bytes
    id: str


class Follow(msgspec.Struct, tag=True):
    """The events from number `start` on; waits for one if there is none yet."""

    owner: bytes
    id: str
    start: int


Call = Put | Append | Get | Delete | Follow


class Result(msgspec.Struct, tag=True):
    """`done`: the document was found, or stored. `full`: there is no room, or the document is too large."""

    done: bool
    data: bytes = b""
    final: bool = False
    events: list[bytes] = []
    full: bool = False


class Store(Protocol):
    async def call(self, call: Call) -> Result: ...


@dataclass
class Document:
    data: bytes = b""
    final_at: float | None = None
    events: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Owned:
    """One client's documents, and what they count for."""

    unfinished: dict[str, Document] = field(default_factory=dict)
    final: OrderedDict[str, Document] = field(default_factory=OrderedDict)  # oldest first
    used: int = 0
    used_unfinished: int = 0

    def find(self, id: str) -> Document | None:
        return self.unfinished.get(id) or self.final.get(id)


class SharedStore:
    """Documents are found by owner and id, so that one client cannot read another's. If there is no room, the oldest
    final ones of whoever has most go: nobody pushes out documents of a client that has less. What is not final stays
    until it is; one client's may take no more than all such documents leave free, so that others find room.

    A document counts for its bytes, or for an equal part of the store if that is more: there is one sum to bound."""

    def __init__(
        self, max_documents: int, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.least = max_bytes // max(1, max_documents)
        self.seconds = seconds
        self.clock = clock
        self.used = 0
        self._used_unfinished = 0
        self._owners: dict[bytes, Owned] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> "SharedStore":
        return cls(config.max_stored_responses, config.max_stored_response_bytes, config.stored_response_ttl)

    def __len__(self) -> int:
        return sum(len(owned.unfinished) + len(owned.final) for owned in self._owners.values())

    async def call(self, call: Call) -> Result:
        self._expire()
        owned = self._owners.get(call.owner, Owned())
        document = owned.find(call.id)
        if isinstance(call, Put) and document is None and call.new:
            return self._put(call, owned, Document())
        if document is None:
            return Result(False)
        match call:
            case Put(new=new):
                return Result(False) if new or document.final_at is not None else self._put(call, owned, document)
            case Append(events=events):
                return self._append(call, owned, document, events)
            case Get():
                return Result(True, document.data, document.final_at is not None)
            case Delete():
                was_final = document.final_at is not None
                self._remove(call.owner, call.id)
                return Result(True, document.data, was_final)
            case Follow(start=start):
                return await self._follow(document, start)

    def _put(self, call: Put, owned: Owned, document: Document) -> Result:
        num_bytes = document.num_bytes + len(call.data) - len(document.data) + (OVERHEAD if call.new else 0)
        if not self._resize(call.owner, owned, document, num_bytes, stays=not call.final):
            return Result(False, full=True)
        self._owners[call.owner] = owned
        document.data = call.data
        owned.unfinished[call.id] = document
        if call.final:
            document.final_at = self.clock()
            owned.final[call.id] = owned.unfinished.pop(call.id)
            self._count_unfinished(owned, -self._size(document.num_bytes))
        self._wake(document)
        return Result(True)

    def _append(self, call: Append, owned: Owned, document: Document, events: list[bytes]) -> Result:
        if document.final_at is not None:
            return Result(False)
        num_bytes = document.num_bytes + sum(len(event) + 64 for event in events)
        if not self._resize(call.owner, owned, document, num_bytes, stays=True):
            return Result(False, full=True)
        document.events += events
        self._wake(document)
        return Result(True)

    @staticmethod
    async def _follow(document: Document, start: int) -> Result:
        if len(document.events) <= start and document.final_at is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(document.changed.wait(), WAIT_SECONDS)
        events = document.events[start : start + MAX_FOLLOWED]
        count = sum(size <= MAX_FOLLOWED_BYTES for size in itertools.accumulate(map(len, events)))
        return Result(True, b"", document.final_at is not None, events[: max(1, count)])

    @staticmethod
    def _wake(document: Document) -> None:
        """Those who wait now; whoever comes later waits for the next change."""
        document.changed.set()
        document.changed = asyncio.Event()

    def _size(self, num_bytes: int) -> int:
        """What a document of that many bytes counts for."""
        return max(num_bytes, self.least) if num_bytes else 0

    def _resize(self, owner: bytes, owned: Owned, document: Document, num_bytes: int, stays: bool) -> bool:
        """Make room for an unfinished document's new size. False, and nothing is changed, if there is none."""
        more = self._size(num_bytes) - self._size(document.num_bytes)
        left = self.max_bytes - self._used_unfinished - more
        if stays and more > 0 and owned.used_unfinished and owned.used_unfinished + more > left:
            return False
        leaving = self._leaving(owner, owned, more)
        if leaving is None:
            return False
        for key in leaving:
            self._remove(*key)
        document.num_bytes = num_bytes
        self.used += more
        owned.used += more
        self._count_unfinished(owned, more)
        return True

    def _leaving(self, owner: bytes, owned: Owned, more: int) -> list[tuple[bytes, str]] | None:
        """The documents that have to go; None if those that may would not make room."""
        over = self.used + more - self.max_bytes
        if over <= 0:
            return []
        used = {who: one.used for who, one in self._owners.items()} | {owner: owned.used + more}
        oldest = {who: iter(one.final.items()) for who, one in self._owners.items()}
        leaving = []
        while over > 0:
            most = max(used, key=used.__getitem__)
            id, document = next(oldest.get(most, iter(())), (None, None))
            if id is None or document is None:
                if most == owner:
                    return None  # all others have less
                del used[most]
                continue
            size = self._size(document.num_bytes)
            leaving.append((most, id))
            used[most] -= size
            over -= size
        return leaving

    def _count_unfinished(self, owned: Owned, by: int) -> None:
        owned.used_unfinished += by
        self._used_unfinished += by

    def _expire(self) -> None:
        before = self.clock() - self.seconds
        for owner, owned in list(self._owners.items()):
            while owned.final:
                id, document = next(iter(owned.final.items()))
                if document.final_at is None or document.final_at > before:
                    break
                self._remove(owner, id)

    def _remove(self, owner: bytes, id: str) -> None:
        owned = self._owners[owner]
        document = owned.find(id)
        assert document is not None
        size = self._size(document.num_bytes)
        if owned.unfinished.pop(id, None) is not None:
            self._count_unfinished(owned, -size)
        owned.final.pop(id, None)
        owned.used -= size
        self.used -= size
        if not owned.unfinished and not owned.final:
            del self._owners[owner]
        document.final_at = document.final_at or self.clock()  # ends whoever follows it
        self._wake(document)
