"""Messages between a server's supervisor and its API processes, over one socket pair per process."""

import asyncio
import socket
import struct
from typing import Any

import msgspec

from quire.entrypoints.http.shared_store import Call, Result
from quire.messages.lora import LoRARequest
from quire.metrics.kinds import Counter, Gauge, Histogram, Metric

LENGTH = struct.Struct("<I")


class RateLimitExceeded(msgspec.Struct, tag=True):
    """Which rate limit refused a request, and when its window ends."""

    kind: str
    message: str
    seconds_left: float


class GetMetrics(msgspec.Struct, tag=True):
    pass


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class SetAdapter(msgspec.Struct, tag=True):
    """Serve an adapter by this name; None: no longer."""

    name: str
    lora: LoRARequest | None


class Metrics(msgspec.Struct, tag=True):
    counters: list[Counter]
    gauges: list[Gauge]
    histograms: list[Histogram]

    @classmethod
    def of(cls, metrics: list[Metric]) -> "Metrics":
        return cls(
            [metric for metric in metrics if isinstance(metric, Counter)],
            [metric for metric in metrics if isinstance(metric, Gauge)],
            [metric for metric in metrics if isinstance(metric, Histogram)],
        )

    def all(self) -> list[Metric]:
        return [*self.counters, *self.gauges, *self.histograms]


class Aborted(msgspec.Struct, tag=True):
    request_ids: list[str]


class Done(msgspec.Struct, tag=True):
    pass


Question = GetMetrics | Abort | SetAdapter
Reply = Metrics | Aborted | Done


# From an API process


class Started(msgspec.Struct, tag=True):
    """The process listens."""

    model_name: str
    kind: str  # what it makes of the model, for the log
    task: str | None = None  # of a model that pools


class Failed(msgspec.Struct, tag=True):
    """The process cannot start."""

    cause: str


class AskPeers(msgspec.Struct, tag=True):
    """A question for all the other API processes."""

    number: int
    question: Question


class PeerReply(msgspec.Struct, tag=True):
    number: int
    reply: Reply


class RateLimitRequest(msgspec.Struct, tag=True):
    """Acquire `count` requests of the client's rate limit."""

    number: int
    client: bytes
    count: int


class TokensUsed(msgspec.Struct, tag=True):
    client: bytes
    tokens: int


class StoreCall(msgspec.Struct, tag=True):
    number: int
    call: Call


# To an API process


class PeerQuestion(msgspec.Struct, tag=True):
    number: int
    question: Question


class PeerReplies(msgspec.Struct, tag=True):
    number: int
    replies: list[Reply]
    complete: bool  # whether all replied in time


class RateLimitReply(msgspec.Struct, tag=True):
    number: int
    refusal: RateLimitExceeded | None


class StoreResult(msgspec.Struct, tag=True):
    number: int
    result: Result


class Drain(msgspec.Struct, tag=True):
    """Admit no more requests, finish the running ones, then exit."""


class End(msgspec.Struct, tag=True):
    """Exit now: a process of the server died. `engine_cause` is set if it was the engine."""

    engine_cause: str | None


FromApi = Started | Failed | AskPeers | PeerReply | RateLimitRequest | TokensUsed | StoreCall
ToApi = PeerQuestion | PeerReplies | RateLimitReply | StoreResult | Drain | End


class MessageChannel:
    """Length-prefixed messages over a stream socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        """`received` is the union of messages that this side accepts."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(received)

    @classmethod
    async def over(cls, sock: socket.socket, received: Any) -> "MessageChannel":
        return cls(*await asyncio.open_unix_connection(sock=sock), received)

    def send(self, message: Any) -> None:
        """Sending to a process that has exited does nothing; its exit is detected elsewhere."""
        self._writer.write(frame(message))

    async def receive(self) -> Any | None:
        """None once the other side has closed."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()


def frame(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
