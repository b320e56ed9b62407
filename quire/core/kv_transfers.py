"""The scheduler's dealings with KV connectors: which requests' blocks are being loaded or sent, and by which."""

import logging
import threading
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
    failed: list[tuple[Request, RequestError]] = field(default_factory=list)  # could not be loaded


class KVTransfers:
    """Without connectors nothing is ever loaded or sent."""

    def __init__(self, connectors: Sequence[SchedulerConnector] = ()) -> None:
        self.connectors = connectors
        self.loading: dict[str, Request] = {}  # not running until their blocks are loaded
        self.sending: dict[str, Request] = {}  # finished; their blocks are kept until all transfers have ended
        self.failed: list[tuple[Request, RequestError]] = []  # while being admitted; emptied by the caller
        self._loader: dict[str, int] = {}  # request -> the connector that loads it
        self._keepers: dict[str, set[tuple[str, int]]] = {}  # request -> ("load" or "send", connector)
        self._must_plan = False  # metadata of a transfer that waits for a plan
        self._notified = False  # the worker's side has something to report
        self._wake = threading.Event()
        self.num_queried = self.num_matched = 0  # tokens, since the start

    def listen(self, pool: BlockPool) -> None:
        """Let connectors hear what happens to the pool's blocks."""
        if self.connectors:
            pool.on_evict.append(self.evict)
        if any(connector.hears_registered for connector in self.connectors):
            pool.on_register.append(self.register)

    @property
    def pending(self) -> bool:
        return bool(self.loading or self.sending)

    @property
    def needs_plan(self) -> bool:
        """Whether a plan must be made even if it computes nothing: to start transfers, or to hear what has ended."""
        return (self._must_plan or self._notified) and self.pending

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

    def match(self, request: Request, num_computed: int) -> Match:
        """What the connector that has most can load, leaving one token to compute."""
        best = NO_MATCH
        most = len(request.token_ids) - 1 - num_computed
        for i, connector in enumerate(self.connectors):
            found = _call(connector.get_num_new_matched_tokens, request, num_computed)
            if found is not None:
                count, loads_async = min(found[0], most), found[1]
                if count > best.num_tokens:
                    best = Match(count, loads_async, i)
        return best

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

    def register(self, block_id: int, key: BlockKey) -> None:
        """The block has its content once the plan that is being made, or one before it, has run."""
        for connector in self.connectors:
            if connector.hears_registered:
                _call(connector.block_registered, block_id, *key)

    def evict(self, block_id: int, key: BlockKey) -> None:
        """The block is about to lose its content."""
        for connector in self.connectors:
            _call(connector.block_evicted, block_id, *key)

    def reset_cache(self) -> None:
        for connector in self.connectors:
            _call(connector.reset_cache)

    def finish(self, request: Request, failed: bool) -> bool:
        """The request has ended. Whether its blocks must be kept until a transfer ends."""
        if not self.connectors:
            return False
        request_id = request.request_id
        self.loading.pop(request_id, None)
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
                error = RequestError(ErrorKind.INTERNAL, sendable(message))
                ended.failed.append((self.loading.pop(request_id), error))
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


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """For methods on which nothing depends: an error is logged, and the result is None."""
    try:
        return method(*arguments)
    except Exception:
        logger.exception("a KV connector failed")
        return None
