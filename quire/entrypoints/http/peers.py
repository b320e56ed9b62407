"""What the API processes of one server know of each other, so that clients see one server."""

import asyncio
import itertools
import logging
import socket
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

from quire.engine.async_llm import AsyncLLM
from quire.engine.metrics import Metric
from quire.entrypoints.http.process_messages import (
    Abort,
    Aborted,
    AskPeers,
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
    ToApi,
    TokensUsed,
)

if TYPE_CHECKING:
    from quire.entrypoints.http.server import Server

logger = logging.getLogger("quire")

ANSWER_SECONDS = 2.0  # a process that does not answer by then is left out
SLOTS = 2  # of each process on the board: its open requests, and those that the engine has not finished


class Peers:
    """No others: the server has one API process."""

    def __init__(self, board: MutableSequence[int] | None = None, index: int = 0) -> None:
        self._board = board if board is not None else [0] * SLOTS
        self._place = SLOTS * index

    def note(self, jobs: int, unfinished: int) -> None:
        """How much this process has to do."""
        self._board[self._place] = jobs
        self._board[self._place + 1] = unfinished

    @property
    def num_jobs(self) -> int:
        """Of the whole server, as is the next."""
        return sum(self._board[0::SLOTS])

    @property
    def num_unfinished(self) -> int:
        return sum(self._board[1::SLOTS])

    async def metrics(self) -> list[list[Metric]] | None:
        """What each of the others counts, or None if that cannot be known now."""
        return []

    async def abort(self, request_ids: list[str]) -> list[str]:
        """Those that ran elsewhere, and were aborted there."""
        return []


class Fleet(Peers):
    """An API process among others. The supervisor passes questions on; counts are on a board in shared memory, where
    each process writes its own places and reads all."""

    def __init__(self, sock: socket.socket, board: MutableSequence[int], index: int) -> None:
        super().__init__(board, index)
        self._sock = sock
        self._numbers = itertools.count()
        self._awaited: dict[int, asyncio.Future[Any]] = {}
        self._channel: MessageChannel | None = None

    async def open(self) -> MessageChannel:
        self._channel = await MessageChannel.over(self._sock, ToApi)
        return self._channel

    async def metrics(self) -> list[list[Metric]] | None:
        answers = await self._ask(GetMetrics())
        if answers is None or not answers.complete:
            return None
        return [reply.all() for reply in answers.replies if isinstance(reply, Metrics)]

    async def abort(self, request_ids: list[str]) -> list[str]:
        answers = await self._ask(Abort(request_ids))
        replies = answers.replies if answers is not None else []
        return [id for reply in replies if isinstance(reply, Aborted) for id in reply.request_ids]

    async def take(self, client: bytes, count: int) -> RateLimitExceeded | None:
        """The server's rate limits are kept by the supervisor. One that does not answer holds up no request."""
        reply = await self._answer(lambda number: RateLimitRequest(number, client, count), ANSWER_SECONDS)
        return reply.refusal if isinstance(reply, RateLimitReply) else None

    def charge(self, client: bytes, tokens: int) -> None:
        if self._channel is not None:
            self._channel.send(TokensUsed(client, tokens))

    async def serve(self, server: "Server", engine: AsyncLLM) -> None:
        """Do what the supervisor says, until it has gone."""
        assert self._channel is not None
        while (message := await self._channel.receive()) is not None:
            match message:
                case PeerReplies(number) | RateLimitReply(number):
                    waiting = self._awaited.get(number)
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
        return Metrics.of(context.own_metrics())

    async def _ask(self, question: Question) -> PeerReplies | None:
        # The supervisor waits as long for the others; its own way here and back comes on top.
        answers = await self._answer(lambda number: AskPeers(number, question), ANSWER_SECONDS + 1)
        return answers if isinstance(answers, PeerReplies) else None

    async def _answer(self, question: Any, timeout: float) -> Any | None:
        if self._channel is None:
            return None
        number = next(self._numbers)
        waiting = self._awaited[number] = asyncio.get_running_loop().create_future()
        self._channel.send(question(number))
        try:
            return await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            logger.warning("the supervisor has not answered for %g s", timeout)
            return None
        finally:
            del self._awaited[number]
