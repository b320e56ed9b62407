"""The scheduler's dealings with KV connectors: which requests' blocks are being loaded or sent, and by which."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.block_pool import BlockKey, BlockPool
from quire.core.request import Request
from quire.messages.connector import SchedulerConnector
from quire.messages.kv_transfer import ConnectorMetadata, FailedMetadata, FinishedTransfers, TierStats
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import ErrorKind, RequestError, failure_of, sendable

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens after those found here that a connector can load, and whether the request must wait for them."""

    num_tokens: int = 0
    loads_async: bool = False
    connector: int = 0


NO_MATCH = Match()


@dataclass(slots=True)
class Ended:
    """What has ended since the last results."""

    loaded: list[Request] = field(default_factory=list)  # their blocks are loaded
    released: list[Request] = field(default_factory=list)  # finished earlier: their blocks can be freed
    recomputed: list[Request] = field(default_factory=list)  # could not be loaded, and compute instead
    failed: list[tuple[Request, RequestError]] = field(default_factory=list)  # could not be loaded


class KVTransfers:
    """Without connectors nothing is ever loaded or sent."""

    def __init__(self, connectors: Sequence[SchedulerConnector] = ()) -> None:
        self.connectors = connectors
        self.looking_up: dict[str, Request] = {}  # not to be admitted until a connector knows what it has of them
        self._answered: deque[str] = deque()  # of these, from any thread
        self.loading: dict[str, Request] = {}  # not running until their blocks are loaded
        self.sending: dict[str, Request] = {}  # finished; their blocks are kept until all transfers have ended
        self.failed: list[tuple[Request, RequestError]] = []  # while being admitted; emptied by the caller
        self._loader: dict[str, int] = {}  # request -> the connector that loads it
        self._keepers: dict[str, set[tuple[str, int]]] = {}  # request -> ("load" or "send", connector)
        self._must_plan = False  # metadata of a transfer that waits for a plan
        self._notified = False  # the worker's side has something to report
        self._wake = threading.Event()
        self.num_queried = self.num_matched = 0  # tokens, since the start
        for connector in connectors:
            connector.bind_scheduler(self.answer)

    def listen(self, pool: BlockPool) -> None:
        """Let connectors hear what happens to the pool's blocks."""
        pool.on_evict += [_listener(connector.block_evicted) for connector in self.connectors]
        hearing = [connector for connector in self.connectors if connector.hears_registered]
        pool.on_register += [_listener(connector.block_registered) for connector in hearing]

    @property
    def pending(self) -> bool:
        return self.moving or bool(self.looking_up) or self._is_wanted

    @property
    def moving(self) -> bool:
        """Whether blocks are being loaded or sent."""
        return bool(self.loading or self.sending)

    @property
    def needs_plan(self) -> bool:
        """Whether a plan must be made even if it computes nothing: to start transfers, or to hear what has ended."""
        started = (self._must_plan or self._notified) and self.moving
        return started or self._is_wanted

    @property
    def _is_wanted(self) -> bool:
        return any(connector.wants_plan for connector in self.connectors)

    def notify(self) -> None:
        """Called from any thread when a transfer has ended."""
        self._notified = True
        self._wake.set()

    def wake(self) -> None:
        """End a wait: there is something else to do."""
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Until `notify` or `wake`."""
        self._wake.wait(seconds)
        self._wake.clear()

    def match(self, request: Request, num_computed: int) -> Match | None:
        """What the connector that has most can load, leaving one token to compute. None if one does not know yet: the
        request is `looking_up`."""
        best, known = NO_MATCH, True
        most = len(request.token_ids) - 1 - num_computed
        for i, connector in enumerate(self.connectors if not request.load_failed else ()):
            found = _call(connector.get_num_new_matched_tokens, request, num_computed)
            if found is not None and found[0] is None:
                known = False
            elif found is not None:
                count, loads_async = min(found[0], most), found[1]
                if count > best.num_tokens:
                    best = Match(count, loads_async, i)
        if not known:
            self.looking_up[request.request_id] = request
            return None
        return best

    def answer(self, request_id: str) -> None:
        """Called from any thread: a connector knows what it has of the request."""
        self._answered.append(request_id)
        self._wake.set()

    def pop_answered(self) -> list[Request]:
        """Requests to be matched again."""
        answered = [self._answered.popleft() for _ in range(len(self._answered))]
        return [self.looking_up.pop(request_id) for request_id in answered if request_id in self.looking_up]

    def count_lookup(self, num_tokens: int, match: Match) -> None:
        """Connectors were asked for `num_tokens`."""
        if self.connectors:
            self.num_queried += num_tokens
            self.num_matched += match.num_tokens

    def start(self, request: Request, match: Match) -> bool:
        """The request has blocks for the tokens of its match. False if its connector raised: it is in `failed`."""
        if not self.connectors:
            return True
        block_ids = request.block_ids()
        for i, connector in enumerate(self.connectors):
            count = match.num_tokens if i == match.connector else 0
            try:
                connector.update_state_after_alloc(request, block_ids, count)
            except Exception as error:
                logger.exception("a KV connector failed")
                if count:
                    self.failed.append((request, failure_of(error)))
                    return False
        if match.loads_async:
            self.loading[request.request_id] = request
            self._loader[request.request_id] = match.connector
            self._must_plan = True
        return True

    def add_meta(self, plan: SchedulerOutput) -> None:
        """Let the plan carry what the worker's side needs."""
        if self.connectors:
            self._must_plan = self._notified = False
            plan.connector_meta = tuple(_metadata(connector, plan) for connector in self.connectors)

    def preempt(self, request: Request) -> None:
        """The request is about to lose its blocks."""
        if self.connectors:
            block_ids = request.block_ids()
            for connector in self.connectors:
                _call(connector.request_preempted, request, block_ids)

    def succeeded(self, plan: SchedulerOutput) -> None:
        for connector in self.connectors:
            _call(connector.plan_succeeded, plan.step)

    def plan_failed(self) -> None:
        """What the worker's side had to report with it was not read: another plan asks again."""
        self._must_plan = True

    def reset_cache(self) -> None:
        for connector in self.connectors:
            _call(connector.reset_cache)

    def forget(self) -> None:
        for connector in self.connectors:
            _call(connector.forget)

    def finish(self, request: Request, failed: bool) -> bool:
        """The request has ended. Whether its blocks must be kept until a transfer ends."""
        if not self.connectors:
            return False
        request_id = request.request_id
        self.loading.pop(request_id, None)
        self.looking_up.pop(request_id, None)
        loader = self._loader.pop(request_id, None)
        if failed:
            for connector in self.connectors:
                _call(connector.request_failed, request)
            return False
        block_ids = request.block_ids()
        keepers = {("load", loader)} if loader is not None else set()
        for i, connector in enumerate(self.connectors):
            if _call(connector.request_finished, request, block_ids):
                keepers.add(("send", i))
        if keepers:
            self.sending[request_id] = request
            self._keepers[request_id] = keepers
            self._must_plan = True
        return bool(keepers)

    def update(self, output: ModelRunnerOutput) -> Ended:
        """By the worker's report."""
        ended = Ended()
        for i, finished in enumerate(output.transfers):
            if finished:
                self._update(i, finished, ended)
        return ended

    def connector_failed(self, connector: int, error: RequestError) -> Ended:
        """A connector raised on the worker's side, which ends all its transfers."""
        loading = [request_id for request_id, loader in self._loader.items() if loader == connector]
        kept = [request_id for request_id, keepers in self._keepers.items() if any(i == connector for _, i in keepers)]
        ended = Ended()
        self._update(connector, FinishedTransfers(failed=dict.fromkeys([*loading, *kept], error.message)), ended)
        return ended

    def close(self) -> None:
        for connector in self.connectors:
            _call(connector.close)

    def stats(self) -> tuple[TierStats, ...]:
        """Of the connectors that keep any."""
        return tuple(found for connector in self.connectors if (found := _call(connector.stats)) is not None)

    def _update(self, connector: int, finished: FinishedTransfers, ended: Ended) -> None:
        for report in finished.reports:
            _call(self.connectors[connector].worker_reported, report)
        for request_id in finished.received:
            if self._loader.get(request_id) == connector:
                del self._loader[request_id]
                ended.loaded.append(self.loading.pop(request_id))
            else:
                self._release(request_id, ("load", connector), ended)
        for request_id in finished.sent:
            self._release(request_id, ("send", connector), ended)
        for request_id, message in finished.failed.items():
            if self._loader.get(request_id) == connector:
                del self._loader[request_id]
                request = self.loading.pop(request_id)
                if self.connectors[connector].recomputes_failed_loads:
                    logger.debug("the KV cache of a request is computed, since it could not be loaded: %s", message)
                    ended.recomputed.append(request)
                else:
                    ended.failed.append((request, RequestError(ErrorKind.INTERNAL, sendable(message))))
            else:
                self._release(request_id, ("load", connector), ended)
                self._release(request_id, ("send", connector), ended)

    def _release(self, request_id: str, keeper: tuple[str, int], ended: Ended) -> None:
        keepers = self._keepers.get(request_id)
        if keepers is None:
            return
        keepers.discard(keeper)
        if not keepers:
            del self._keepers[request_id]
            ended.released.append(self.sending.pop(request_id))


def _metadata(connector: SchedulerConnector, plan: SchedulerOutput) -> ConnectorMetadata | None:
    try:
        return connector.build_connector_meta(plan)
    except Exception as error:
        return FailedMetadata(f"{type(error).__name__}: {error}")


def _listener(method: Callable[[int, bytes, int], None]) -> Callable[[int, BlockKey], None]:
    """As `_call`, with a call less: a long prompt registers and evicts hundreds of blocks."""

    def listener(block_id: int, key: BlockKey) -> None:
        try:
            method(block_id, *key)
        except Exception:
            logger.exception("a KV connector failed")

    return listener


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """For methods on which nothing depends: an error is logged, and the result is None."""
    try:
        return method(*arguments)
    except Exception:
        logger.exception("a KV connector failed")
        return None
