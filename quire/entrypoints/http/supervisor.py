"""Supervises a server of several API processes: starts them and the engine, and stops them together."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from quire.config import EngineConfig
from quire.config.server import ServerConfig
from quire.core.engine_start import SPAWN, EngineStart
from quire.engine.engine_connection import EngineConnection, how_it_ended
from quire.engine.resolve_config import resolve_config
from quire.entrypoints.http.api_process import ApiProcess, api_process_main
from quire.entrypoints.http.peers import LOAD_FIELDS, REPLY_SECONDS
from quire.entrypoints.http.process_messages import (
    AskPeers,
    Drain,
    End,
    Failed,
    FromApi,
    MessageChannel,
    PeerQuestion,
    PeerReplies,
    PeerReply,
    Question,
    RateLimitReply,
    RateLimitRequest,
    Reply,
    Started,
    StoreCall,
    StoreResult,
    TokensUsed,
)
from quire.entrypoints.http.rate_limit import FixedWindowLimiter
from quire.entrypoints.http.server import GRACE, SIGNALS, announce, base_url, handled_signals
from quire.entrypoints.http.shared_store import Call, Follow, SharedStore
from quire.messages.protocol import Dead, Goodbye

logger = logging.getLogger("quire")


@dataclass
class Api:
    index: int
    process: BaseProcess
    sock: socket.socket
    channel: MessageChannel | None = None

    @property
    def name(self) -> str:
        return f"API process {self.index}"


class Supervisor:
    """Serves no requests itself. Holds the state that exists once per server: rate limits, stored responses, and
    the reason it ended."""

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        api_keys: tuple[str, ...],
        listener: socket.socket,
        start: EngineStart,
    ) -> None:
        self.config = config
        self.engine_config, checkpoint = resolve_config(engine_config)  # download once, not in every process
        self.checkpoint_name = checkpoint.name
        self.api_keys = api_keys
        self.listener = listener
        self._engine_start = start
        self._apis: list[Api] = []
        self._alive: set[BaseProcess] = set()
        self._started: list[Started] = []
        self._limits = FixedWindowLimiter.of(config)
        self._store = SharedStore.of(config)
        self._pending_replies: dict[int, asyncio.Future[Reply]] = {}
        self._num_questions = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: str | None = None
        self._engine_cause: str | None = None
        self._start_error: str | None = None  # why an API process could not start
        self._signals: list[int] = []

    def run(self) -> int:
        """The exit code."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        for sig in handled_signals():
            loop.add_signal_handler(sig, self._on_signal, sig)
        url = base_url(self.listener, self.config)
        self._engine = EngineConnection(self.engine_config, client=None, start=self._engine_start)
        try:
            self._watch(self._engine.host.process, self._engine_ended)
            await self._start_apis()
            self.listener.close()  # or the port would stay open after the API processes have closed it
            await self._until(lambda: len(self._started) == len(self._apis) or self._ending)
            if not self._ending:
                ready = self._engine.wait_ready()
                self._engine.host.all_connected()
                for line in ready.summary.lines(self.checkpoint_name):
                    logger.info(line)
                logger.info("%d API processes, ready in %.1f s", len(self._apis), time.perf_counter() - began)
                one = self._started[0]
                announce(url, one.model_name, one.kind, self.config, one.task)
                await self._until(lambda: self._ending)
                await self._end_apis()
        finally:
            self._end_all()
        if self._start_error is not None:
            raise ValueError(self._start_error)
        if self._failure is not None:
            logger.error("%s; the server has ended", self._failure)
            return 1
        return 128 + self._signals[1] if len(self._signals) > 1 else 0

    @property
    def _ending(self) -> bool:
        return bool(self._failure or self._start_error or self._signals)

    @property
    def _forced(self) -> bool:
        return len(self._signals) > 1

    def _on_signal(self, sig: int) -> None:
        """The first signal drains, the second exits at once."""
        self._signals.append(sig)
        self._changed.set()

    async def _start_apis(self) -> None:
        load_board = SPAWN.RawArray("q", LOAD_FIELDS * self.config.api_server_count)
        for index in range(self.config.api_server_count):
            ours, theirs = socket.socketpair()
            with theirs:
                args = ApiProcess(
                    index,
                    self.config,
                    self.engine_config,
                    self.api_keys,
                    self._engine.host.folder,
                    self.listener,
                    theirs,
                    load_board,
                    logger.getEffectiveLevel(),
                )
                api = Api(index, SPAWN.Process(target=api_process_main, args=(args,), name=f"quire-api-{index}"), ours)
                api.process.start()
            self._apis.append(api)
            self._watch(api.process, lambda api=api: self._api_ended(api))  # type: ignore[misc]
            api.channel = await MessageChannel.over(ours, FromApi)
            self._keep_task(asyncio.create_task(self._listen(api, api.channel)))

    # Exits

    def _watch(self, process: BaseProcess, ended: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._alive.add(process)

        def on_exit() -> None:
            loop.remove_reader(process.sentinel)
            process.join()
            self._alive.discard(process)
            ended()
            self._changed.set()

        loop.add_reader(process.sentinel, on_exit)

    def _engine_ended(self) -> None:
        if self._failure is None:
            self._engine_cause = self._reported_death() or how_it_ended(self._engine.host.process)
            self._failure = f"the engine process has died: {self._engine_cause}"
            self._broadcast(End(self._engine_cause))

    def _api_ended(self, api: Api) -> None:
        drained = bool(self._signals) and api.process.exitcode == 0
        self._engine.send(Goodbye(api.index))
        if self._failure is not None or self._start_error is not None or drained:
            return
        # It may have exited because the engine died.
        self._engine_cause = self._reported_death()
        if self._engine_cause is not None:
            self._failure = f"the engine process has died: {self._engine_cause}"
        else:
            self._failure = f"{api.name} {how_it_ended(api.process)}"
        self._broadcast(End(self._engine_cause))

    def _reported_death(self) -> str | None:
        while (message := self._engine.receive(timeout=0.1)) is not None:
            if isinstance(message, Dead):
                return message.cause
        return None

    async def _end_apis(self) -> None:
        """Let them finish their requests within --shutdown-timeout, unless the server has failed."""
        if self._failure is None:
            logger.info("shutting down; running requests have %g s to end", self.config.shutdown_timeout)
            self._broadcast(Drain())
            await self._until(
                lambda: self._all_apis_ended or self._failure is not None or self._forced,
                self.config.shutdown_timeout + GRACE + 2,
            )
        if self._failure is not None:
            await self._until(lambda: self._all_apis_ended or self._forced, GRACE + 1)

    @property
    def _all_apis_ended(self) -> bool:
        return not any(api.process in self._alive for api in self._apis)

    def _end_all(self) -> None:
        for sig in SIGNALS:
            signal.signal(sig, signal.SIG_IGN)  # already exiting
        for process in self._alive:
            asyncio.get_running_loop().remove_reader(process.sentinel)  # exits are expected now
        for api in self._apis:
            if api.process.is_alive():
                api.process.kill()
        for api in self._apis:
            api.process.join()
        orderly = self._failure is None and self._start_error is None and not self._forced
        self._engine.close(timeout=10.0 if orderly else 0.0)

    # Messages from API processes

    async def _listen(self, api: Api, channel: MessageChannel) -> None:
        while (message := await channel.receive()) is not None:
            match message:
                case Started():
                    self._started.append(message)
                    self._changed.set()
                case Failed(cause):
                    self._start_error = self._start_error or cause
                    self._changed.set()
                case RateLimitRequest(number, client, count):
                    refusal = self._limits.acquire_now(client, count) if self._limits else None
                    channel.send(RateLimitReply(number, refusal))
                case TokensUsed(client, tokens):
                    if self._limits is not None:
                        self._limits.charge(client, tokens)
                case StoreCall(number, call):
                    await self._call_store(channel, number, call)
                case AskPeers(number, question):
                    self._keep_task(asyncio.create_task(self._ask_peers(api, channel, number, question)))
                case PeerReply(number, reply):
                    waiting = self._pending_replies.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)

    async def _call_store(self, channel: MessageChannel, number: int, call: Call) -> None:
        async def reply() -> None:
            channel.send(StoreResult(number, await self._store.call(call)))

        if isinstance(call, Follow):  # waits
            self._keep_task(asyncio.create_task(reply()))
        else:
            await reply()

    async def _ask_peers(self, asking: Api, channel: MessageChannel, number: int, question: Question) -> None:
        pending: dict[int, asyncio.Future[Reply]] = {}
        for api in self._apis:
            if api is not asking and api.channel is not None:
                self._num_questions += 1
                pending[self._num_questions] = asyncio.get_running_loop().create_future()
                api.channel.send(PeerQuestion(self._num_questions, question))
        self._pending_replies |= pending
        if pending:  # empty while the other processes are starting
            await asyncio.wait(pending.values(), timeout=REPLY_SECONDS)
        for pending_number in pending:
            del self._pending_replies[pending_number]
        replies = [future.result() for future in pending.values() if future.done()]
        channel.send(PeerReplies(number, replies, complete=len(replies) == len(pending)))

    def _broadcast(self, message: Drain | End) -> None:
        for api in self._apis:
            if api.channel is not None and api.process in self._alive:
                api.channel.send(message)

    def _keep_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait for `condition`, which changes only when `_changed` is set."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
