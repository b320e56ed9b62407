"""State shared between the API processes of one server, so that clients see one server."""

import asyncio
import itertools
import logging
import socket
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.http.errors import overloaded
from quire.entrypoints.http.process_messages import (
    Abort,
    Aborted,
    AskPeers,
    Done,
    Drain,
    End,
    GetMetrics,
    MessageChannel,
    Metrics,
    PeerQuestion,
    PeerReplies,
    PeerReply,
    Question,
    RateLimitExceeded,
    RateLimitReply,
    RateLimitRequest,
    Reply,
    SetAdapter,
    StoreCall,
    StoreResult,
    ToApi,
    TokensUsed,
)
from quire.entrypoints.http.shared_store import WAIT_SECONDS, Call, Result
from quire.messages.lora import LoRARequest
from quire.metrics.kinds import Metric

if TYPE_CHECKING:
    from quire.entrypoints.http.server import Server

logger = logging.getLogger("quire")

REPLY_SECONDS = 2.0  # a process that has not replied by then is left out
LOAD_FIELDS = 2  # per process on the load board: open HTTP requests, unfinished engine sequences


class Peers:
    """The single API process of a server: there are no peers."""

    def __init__(self, load_board: MutableSequence[int] | None = None, index: int = 0) -> None:
        self._load_board = load_board if load_board is not None else [0] * LOAD_FIELDS
        self._offset = LOAD_FIELDS * index

    def report(self, jobs: int, unfinished: int) -> None:
        """Publish this process's load."""
        self._load_board[self._offset] = jobs
        self._load_board[self._offset + 1] = unfinished

    @property
    def num_jobs(self) -> int:
        """Over all API processes, as `num_unfinished`."""
        return sum(self._load_board[0::LOAD_FIELDS])

    @property
    def num_unfinished(self) -> int:
        return sum(self._load_board[1::LOAD_FIELDS])

    async def metrics(self) -> list[list[Metric]] | None:
        """Each peer's metrics, or None if one did not reply."""
        return []

    async def abort(self, request_ids: list[str]) -> list[str]:
        """The ids that peers found and aborted."""
        return []

    async def set_adapter(self, name: str, lora: LoRARequest | None) -> None:
        """Peers serve it from now on, or no longer."""


class RemotePeers(Peers):
    """One of several API processes. The supervisor forwards questions; the load board is shared memory, where each
    process writes its own fields and reads all."""

    def __init__(self, sock: socket.socket, load_board: MutableSequence[int], index: int) -> None:
        super().__init__(load_board, index)
        self._sock = sock
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._channel: MessageChannel | None = None

    async def open(self) -> MessageChannel:
        self._channel = await MessageChannel.over(self._sock, ToApi)
        return self._channel

    async def metrics(self) -> list[list[Metric]] | None:
        result = await self._ask(GetMetrics())
        if result is None or not result.complete:
            return None
        return [reply.all() for reply in result.replies if isinstance(reply, Metrics)]

    async def abort(self, request_ids: list[str]) -> list[str]:
        result = await self._ask(Abort(request_ids))
        replies = result.replies if result is not None else []
        return [id for reply in replies if isinstance(reply, Aborted) for id in reply.request_ids]

    async def set_adapter(self, name: str, lora: LoRARequest | None) -> None:
        await self._ask(SetAdapter(name, lora))

    async def acquire(self, client: bytes, count: int) -> RateLimitExceeded | None:
        """The supervisor keeps the rate limits. If it does not reply, the request is admitted."""
        reply = await self._request(lambda number: RateLimitRequest(number, client, count), REPLY_SECONDS)
        return reply.refusal if isinstance(reply, RateLimitReply) else None

    def charge(self, client: bytes, tokens: int) -> None:
        if self._channel is not None:
            self._channel.send(TokensUsed(client, tokens))

    async def call(self, call: Call) -> Result:
        """The supervisor keeps the store."""
        reply = await self._request(lambda number: StoreCall(number, call), WAIT_SECONDS + REPLY_SECONDS)
        if not isinstance(reply, StoreResult):
            raise overloaded("the server's store does not respond", 1)
        return reply.result

    async def serve(self, server: "Server", engine: AsyncLLM) -> None:
        """Handle the supervisor's messages until it exits."""
        assert self._channel is not None
        while (message := await self._channel.receive()) is not None:
            match message:
                case PeerReplies(number) | RateLimitReply(number) | StoreResult(number):
                    waiting = self._pending.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                case PeerQuestion(number, question):
                    self._channel.send(PeerReply(number, await self._reply(server, question)))
                case Drain():
                    server.should_exit = True
                case End(engine_cause):
                    if engine_cause is not None:
                        engine.engine_died(engine_cause)
                    server.fail(engine_cause)

    async def _reply(self, server: "Server", question: Question) -> Reply:
        context = server.context
        if isinstance(question, Abort):
            return Aborted(await context.abort(question.request_ids))
        if isinstance(question, SetAdapter):
            if question.lora is None:
                context.adapters.forget(question.name)
            else:
                context.adapters.register(question.lora)
            return Done()
        return Metrics.of(context.own_metrics())

    async def _ask(self, question: Question) -> PeerReplies | None:
        # The supervisor waits REPLY_SECONDS for the peers; add the round trip to it.
        result = await self._request(lambda number: AskPeers(number, question), REPLY_SECONDS + 1)
        return result if isinstance(result, PeerReplies) else None

    async def _request(self, question: Any, timeout: float) -> Any | None:
        if self._channel is None:
            return None
        number = next(self._numbers)
        waiting = self._pending[number] = asyncio.get_running_loop().create_future()
        self._channel.send(question(number))
        try:
            return await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            logger.warning("the supervisor has not replied within %g s", timeout)
            return None
        finally:
            del self._pending[number]
