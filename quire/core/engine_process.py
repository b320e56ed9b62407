"""An engine core in a process of its own: handle incoming messages, step, send outputs.

The engine's thread never touches a socket: two threads do, and exchange messages with it through queues.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import zmq

from quire.config import EngineConfig, environment
from quire.config.logs import set_up_logging
from quire.core.engine_core import EngineCore
from quire.executor.factory import make_executor
from quire.messages.protocol import (
    CLIENT_SHIFT,
    AddRequests,
    Call,
    Codec,
    Dead,
    FinishRequests,
    Goodbye,
    Heartbeat,
    Hello,
    Outputs,
    Ready,
    Result,
    Shutdown,
    ToEngine,
    Unreadable,
    Watch,
)
from quire.messages.requests import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestError,
    SchedulerStats,
    failure_of,
    invalid,
    sendable,
)
from quire.metrics.stats_logger import StatsLogger
from quire.platforms.start_up import collector_paused

logger = logging.getLogger("quire")

MESSAGE_SECONDS = 0.02  # for messages between two steps, if the last step was no longer than that
STATS_SECONDS = 0.25  # the oldest that stats may get in a front end without running requests
HELLO_SECONDS = 5.0  # to wait for a front end that is to learn of a failure

Incoming = tuple[bytes, Any]  # sender, message


class EngineProcess:
    """Serves any number of front ends. Runs until it is shut down, or until the process that started it is gone."""

    def __init__(self, make_core: Callable[[], EngineCore], address: str, heartbeat_seconds: float = 1.0) -> None:
        self._in: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._addresses: dict[bytes, str] = {}  # front end -> where it listens
        self._clients: dict[int, str] = {}  # client number of an index -> where it listens
        self._watching: dict[int, str] = {}  # those of them that want heartbeats
        self._heartbeat_seconds = heartbeat_seconds
        self._message_seconds = MESSAGE_SECONDS
        self._step_began: float | None = None  # None while the loop waits for work
        self._sent_stats: dict[int, SchedulerStats] = {}  # client -> the last stats sent to it
        self._stats_due = 0.0
        self._ready: Ready | None = None
        self._stopping = False
        self._io_threads = [
            threading.Thread(target=self._receive, args=(address,), name="quire-in", daemon=True),
            threading.Thread(target=self._send, name="quire-out", daemon=True),
        ]
        for thread in self._io_threads:
            thread.start()
        self._make_core = make_core

    def run(self) -> int:
        """The exit code."""
        try:
            self.core = self._make_core()
            core = self.core
            if (on_failure := getattr(core.executor, "on_failure", None)) is not None:  # users' own may have none
                on_failure(lambda error: self._in.put((b"", error)))
            self._ready = Ready(core.max_model_len, core.summary, core.num_blocks, core.max_num_seqs, core.features)
            while not self._stopping:
                self._handle_messages(block=not self.core.has_unfinished())
                began = self._step_began = time.monotonic()
                outputs = self.core.step()
                self._message_seconds = max(MESSAGE_SECONDS, time.monotonic() - began)
                if outputs is not None and (len(outputs.index) or outputs.prompt_logprobs):
                    self._send_outputs(outputs)
                self._send_stats()
        except Exception as error:
            if isinstance(error, ValueError) and self._ready is None:
                logger.debug("the engine ends", exc_info=True)  # a configuration error: the message is enough
            else:
                logger.exception("the engine ends")
            self._handle_hellos()
            self._broadcast(Dead(str(error) if self._ready is None else f"{type(error).__name__}: {error}"))
            self._close()
            return 1
        self._broadcast(Dead("the engine was shut down"))
        self._close()
        return 0

    def _handle_messages(self, block: bool) -> None:
        """Messages that have arrived; if there is no request, wait for one. However many messages come, steps get half
        of the time."""
        until = time.monotonic() + self._message_seconds
        while not self._stopping:
            if block:
                self._step_began = None
            try:
                sender, message = self._in.get(block)
            except queue.Empty:
                return
            if block:
                self._step_began = time.monotonic()
                until = self._step_began + self._message_seconds
            self._handle(sender, message)
            block = block and not self.core.has_unfinished()
            if not block and time.monotonic() > until:
                return

    def _handle(self, sender: bytes, message: Any) -> None:
        if isinstance(message, Exception):
            raise message  # a worker has ended
        if sender not in self._addresses and not isinstance(message, Hello):
            return  # sent before its Goodbye, which another process sent for it
        match message:
            case AddRequests(requests):
                for request in requests:
                    self._add(request)
            case FinishRequests(request_ids):
                self.core.finish_requests(request_ids)
            case Call():
                self._out.put((self._addresses[sender], self._handle_call(message)))
            case Unreadable():
                self._reject(sender, message)
            case Hello(address, client):
                self._addresses[sender] = address
                if client is not None:
                    self._clients[client] = address
                if self._ready is not None:
                    self._out.put((address, self._ready))
            case Goodbye(client):
                running = self.core.scheduler.requests.values()
                requests = [*(r.core for r in running), *self.core.control.held]
                self.core.finish_requests([r.request_id for r in requests if r.index >> CLIENT_SHIFT == client])
                closed = self._clients.pop(client, None)
                self._sent_stats.pop(client, None)
                self._watching.pop(client, None)
                self._addresses = {who: address for who, address in self._addresses.items() if address != closed}
                if closed is not None:
                    self._out.put((closed, None))
            case Shutdown():
                self._stopping = True

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self.core.add_request(request)
        except ValueError as error:
            self._end([request.index + i for i in range(request.sampling.n)], invalid(str(error)))
        except Exception as error:
            logger.exception("request %s could not be added", request.request_id)
            self._end([request.index + i for i in range(request.sampling.n)], failure_of(error))

    def _end(self, indices: list[int], error: RequestError) -> None:
        self._send_outputs(EngineCoreOutputs.ended(indices, FinishReason.ERROR, error))

    def _handle_call(self, call: Call) -> Result:
        number, name = call.number, call.name
        try:
            if name == "collective_rpc":
                method, *args = call.args
                return Result(number, values=self.core.collective_rpc(str(method), args, call.kwargs))
            if name == "reset_prefix_cache":
                self.core.reset_prefix_cache()
                return Result(number)
            if name == "control":
                method, *args = call.args
                return Result(number, values=self.core.control.call(str(method), args))
            if name == "adapters":
                method, *args = call.args
                return Result(number, values=self.core.call_adapters(str(method), args))
            if name == "state":
                return Result(number, values=self.core.state())
            if name == "kv_event_sources":
                return Result(number, values=self.core.kv_event_sources())
            if name == "view":
                return Result(number, values=self.core.view(*call.args))
        except ValueError as error:
            return Result(number, sendable(str(error)))
        except Exception as error:
            logger.exception("%s failed", name)
            return Result(number, sendable(f"{type(error).__name__}: {error}"))
        return Result(number, f"unknown call {name!r}")

    def _reject(self, sender: bytes, message: "Unreadable") -> None:
        """Answer an unreadable message, so that its sender does not wait for ever."""
        if message.indices:
            self._end(message.indices, invalid(message.cause))
        for number in message.calls:
            self._out.put((self._addresses[sender], Result(number, message.cause)))

    def _handle_hellos(self) -> None:
        """Register front ends that connected while the engine was loading, so that they learn why it failed, and those
        that are about to: it may fail sooner than sockets try again to connect."""
        wait = HELLO_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                sender, message = self._in.get(timeout=wait if self._ready is None else 0)
                wait = 0.3
                if isinstance(message, Hello):
                    self._handle(sender, message)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Send each front end the outputs of its own requests."""
        if len(self._clients) == 1:
            ((client, address),) = self._clients.items()
            self._out.put((address, Outputs(outputs)))
            self._note_sent_stats(client, outputs.stats)
            return
        clients = set(np.unique(outputs.index >> CLIENT_SHIFT).tolist())
        clients |= {part.owner >> CLIENT_SHIFT for part in outputs.prompt_logprobs}
        clients |= {index >> CLIENT_SHIFT for index in outputs.preempted}
        for client in clients & self._clients.keys():
            part = outputs.select(client << CLIENT_SHIFT, (client + 1) << CLIENT_SHIFT)
            self._out.put((self._clients[client], Outputs(part)))
            self._note_sent_stats(client, outputs.stats)

    def _note_sent_stats(self, client: int, stats: SchedulerStats | None) -> None:
        if stats is not None:
            self._sent_stats[client] = stats

    def _send_stats(self) -> None:
        """Stats are part of outputs. A front end without outputs gets them every STATS_SECONDS, and all get the last
        ones before the engine is idle."""
        idle = not self.core.has_unfinished()
        if not idle and (len(self._clients) < 2 or time.monotonic() < self._stats_due):
            return
        stats = self.core.scheduler.stats()
        self._stats_due = stats.time + STATS_SECONDS
        update = EngineCoreOutputs.ended([], FinishReason.NONE)
        update.stats = stats
        for client, address in self._clients.items():
            sent = self._sent_stats.get(client)
            if sent is None or msgspec.structs.replace(sent, time=stats.time) != stats:
                self._out.put((address, Outputs(update)))
                self._sent_stats[client] = stats

    def _broadcast(self, message: Any) -> None:
        for address in self._addresses.values():
            self._out.put((address, message))

    def _close(self) -> None:
        self._out.put(None)
        self._io_threads[1].join(timeout=5)
        if hasattr(self, "core"):
            self.core.shutdown()

    def _receive(self, address: str) -> None:
        codec = Codec(ToEngine)
        socket = zmq.Context().socket(zmq.ROUTER)
        socket.bind(address)
        while True:
            sender, *frames = socket.recv_multipart()
            try:
                message = codec.decode(frames)
            except Exception as error:  # this thread must go on: all requests come through it
                logger.warning("refused: %s", error)
                message = Unreadable.of(frames, str(error))
            if isinstance(message, Watch):
                self._watch(sender, message.client)  # not queued: the engine's thread may be in a long step
            else:
                self._in.put((sender, message))
                if self._ready is not None:
                    self.core.wake()

    def _watch(self, sender: bytes, client: int) -> None:
        address = self._addresses.get(sender)
        if address is not None:
            self._watching[client] = address

    def _send(self) -> None:
        context = zmq.Context()  # its own: the other thread's has a socket that never closes, and cannot be terminated
        codec = Codec()
        sockets: dict[str, zmq.Socket] = {}
        for address, message in self._outgoing():
            if message is None:
                if address in sockets:
                    sockets.pop(address).close()
                continue
            if address not in sockets:
                socket = sockets[address] = context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, 1000)
                socket.setsockopt(zmq.SNDHWM, 0)  # no limit: the engine never waits for a slow front end
                socket.connect(address)
            try:
                frames = codec.encode(message)
            except Exception as error:  # this thread must go on: all outputs go through it
                logger.exception("a message to a front end cannot be sent")
                frames = codec.encode(_unsent(message, error))
            sockets[address].send_multipart(frames, copy=False)
        for socket in sockets.values():
            socket.close()
        context.term()  # the process may end now: its last messages are sent, or were not received for a second

    def _outgoing(self) -> Iterator[tuple[str, Any]]:
        """The engine thread's messages to front ends, and heartbeats, which do not need that thread."""
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                due = now + self._heartbeat_seconds
                began = self._step_began
                heartbeat = Heartbeat(now - began if began is not None else 0.0)
                yield from [(address, heartbeat) for address in list(self._watching.values())]
            try:
                item = self._out.get(timeout=max(0.0, due - now))
            except queue.Empty:
                continue
            if item is None:
                return
            yield item


def _unsent(message: Any, error: Exception) -> Any:
    """What a front end gets in place of a message that cannot be encoded."""
    if isinstance(message, Outputs):
        index = message.outputs.index.tolist()
        return Outputs(EngineCoreOutputs.ended(index, FinishReason.ERROR, failure_of(error)))
    if isinstance(message, Result):
        return Result(message.number, sendable(f"the answer cannot be sent: {error}"))
    return Dead(sendable(f"a message cannot be sent: {error}"))


def engine_process_main(config: EngineConfig, address: str, log_level: int = logging.WARNING) -> None:
    """What the process of an EngineStart runs. `log_level` is the one of the process that starts it."""
    set_up_logging(log_level, config.observability.log_config_file)

    @collector_paused()
    def make_core() -> EngineCore:
        from quire.platforms.defaults import with_platform_defaults

        complete = with_platform_defaults(config)
        core = EngineCore(complete, make_executor(complete, in_engine_process=True))
        core.executor.collective_rpc("make_memory_ready", (), {})
        if not complete.observability.disable_log_stats and logger.isEnabledFor(logging.INFO):
            StatsLogger(core.scheduler, environment.VLLM_LOG_STATS_INTERVAL.get()).start()
        return core

    timeout = config.observability.engine_heartbeat_timeout
    os._exit(EngineProcess(make_core, address, min(1.0, timeout / 4) if timeout else 1.0).run())
