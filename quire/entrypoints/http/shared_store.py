"""Documents that outlive their requests, such as responses: in memory, bounded, and once per server.

With several API processes the supervisor has the store, and they send it these calls (`RemotePeers.call`).
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
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


class SharedStore:
    """Keys are owner and id, so that one client cannot read another's. If there is no room, the oldest final documents
    go; those that are not final stay until they are."""

    def __init__(
        self, max_documents: int, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_documents = max_documents
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.clock = clock
        self.num_bytes = 0
        self._unfinished: dict[tuple[bytes, str], Document] = {}
        self._final: OrderedDict[tuple[bytes, str], Document] = OrderedDict()  # oldest first

    @classmethod
    def of(cls, config: ServerConfig) -> "SharedStore":
        return cls(config.max_stored_responses, config.max_stored_response_bytes, config.stored_response_ttl)

    def __len__(self) -> int:
        return len(self._unfinished) + len(self._final)

    async def call(self, call: Call) -> Result:
        self._expire()
        key = (call.owner, call.id)
        match call:
            case Put(data=data, final=final, new=new):
                return self._put(key, data, final, new)
            case Append(events=events):
                return self._append(key, events)
            case Get():
                document = self._find(key)
                if document is None:
                    return Result(False)
                return Result(True, document.data, document.final_at is not None)
            case Delete():
                document = self._find(key)
                if document is None:
                    return Result(False)
                was_final = document.final_at is not None
                self._remove(key)
                return Result(True, document.data, was_final)
            case Follow(start=start):
                return await self._follow(key, start)

    def _find(self, key: tuple[bytes, str]) -> Document | None:
        return self._unfinished.get(key) or self._final.get(key)

    def _put(self, key: tuple[bytes, str], data: bytes, final: bool, new: bool) -> Result:
        document = self._find(key)
        if new != (document is None) or (document is not None and document.final_at is not None):
            return Result(False)
        old = 0 if document is None else len(document.data)
        if not self._make_room(len(data) - old + (OVERHEAD if new else 0), int(new)):
            return Result(False, full=True)
        if document is None:
            document = self._unfinished[key] = Document(num_bytes=OVERHEAD)
            self.num_bytes += OVERHEAD
        self._grow(document, len(data) - old)
        document.data = data
        if final:
            document.final_at = self.clock()
            self._final[key] = self._unfinished.pop(key)
        self._wake(document)
        return Result(True)

    def _append(self, key: tuple[bytes, str], events: list[bytes]) -> Result:
        document = self._unfinished.get(key)
        if document is None:
            return Result(False)
        more = sum(len(event) + 64 for event in events)
        if not self._make_room(more, 0):
            return Result(False, full=True)
        self._grow(document, more)
        document.events += events
        self._wake(document)
        return Result(True)

    async def _follow(self, key: tuple[bytes, str], start: int) -> Result:
        document = self._find(key)
        if document is None:
            return Result(False)
        if len(document.events) <= start and document.final_at is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(document.changed.wait(), WAIT_SECONDS)
        events = document.events[start : start + MAX_FOLLOWED]
        count = sum(size <= MAX_FOLLOWED_BYTES for size in itertools.accumulate(map(len, events)))
        return Result(True, b"", document.final_at is not None, events[: max(1, count)])

    def _grow(self, document: Document, by: int) -> None:
        document.num_bytes += by
        self.num_bytes += by

    @staticmethod
    def _wake(document: Document) -> None:
        """Those who wait now; whoever comes later waits for the next change."""
        document.changed.set()
        document.changed = asyncio.Event()

    def _make_room(self, num_bytes: int, num_documents: int) -> bool:
        for key in list(self._too_many(num_bytes, num_documents)):
            self._remove(key)
        fits = self.num_bytes + num_bytes <= self.max_bytes
        return fits and len(self) + num_documents <= self.max_documents

    def _too_many(self, num_bytes: int, num_documents: int) -> Iterator[tuple[bytes, str]]:
        """The documents that have to go; none if all of them would not make room."""
        bytes_over = self.num_bytes + num_bytes - self.max_bytes
        documents_over = len(self) + num_documents - self.max_documents
        if bytes_over <= 0 and documents_over <= 0:
            return
        if documents_over > len(self._final) or bytes_over > sum(one.num_bytes for one in self._final.values()):
            return
        for key, document in self._final.items():
            if bytes_over <= 0 and documents_over <= 0:
                return
            yield key
            bytes_over -= document.num_bytes
            documents_over -= 1

    def _expire(self) -> None:
        now = self.clock()
        while self._final:
            key, document = next(iter(self._final.items()))
            if document.final_at is None or now - document.final_at < self.seconds:
                return
            self._remove(key)

    def _remove(self, key: tuple[bytes, str]) -> None:
        document = self._unfinished.pop(key, None) or self._final.pop(key)
        self.num_bytes -= document.num_bytes
        document.final_at = document.final_at or self.clock()  # ends whoever follows it
        self._wake(document)
