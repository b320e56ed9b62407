"""The scheduler's side of a store connector: lookups that never hold it up, what is saved, what is loaded."""

import functools
import logging
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.block_keys import BlockKey, BlockKeys
from quire.distributed.kv_offload.block_store import PERCENTILES, BlockStore, StoreKeys
from quire.distributed.kv_offload.circuit_breaker import CircuitBreaker
from quire.distributed.kv_offload.confirmed_saves import ConfirmedSaves
from quire.distributed.kv_offload.deadlines import Deadlines
from quire.distributed.kv_offload.io_pool import IOPool, Urgency, close_all
from quire.distributed.kv_offload.store_metadata import BlockJob, StoreMetadata, StoreReport
from quire.messages.connector import ConnectorRequest
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.kv_transfer import ConnectorReport, TierStats
from quire.messages.plan import SchedulerOutput

logger = logging.getLogger("quire")

MAX_KNOWN = 1 << 18  # keys that are believed to be in the store, and not saved again
LOOKUP_THREADS = 2


@dataclass(slots=True)
class _Lookup:
    """Of one request: what of it the store has, once `found` is known."""

    request_id: str
    start: int = 0  # tokens that it had when it was asked last
    found: set[BlockKey] | None = None
    answered: bool = False  # by the store, or by the end of the time that it has for it


@dataclass(slots=True)
class _Answers:
    """Written by the lookup threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    by_request: dict[str, set[BlockKey]] = field(default_factory=dict)


class StoreScheduler(KVConnector):
    """A request is looked up in a thread when it is first to be admitted, and set aside meanwhile. If the store no
    longer has what it had then, the load fails and the request computes. A request that waits longer than `deadline`
    seconds for its lookup has found nothing. If calls of the store take that long, it is left alone for a while: a file
    system may hang.

    `asynchronous`: saves are copied off the device while steps run, so that a plan which overwrites one of their
    blocks must be told.
    """

    hears_registered = True

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KVCacheConfig,
        store: BlockStore,
        tier: str,
        asynchronous: bool,
        deadline: float = 5.0,
    ) -> None:
        super().__init__(config, layout, "scheduler")
        self.tier = tier
        self._store = store
        self._asynchronous = asynchronous
        self._loads = config.role != "kv_producer"
        self._saves = config.role != "kv_consumer"
        self._keys = BlockKeys(layout)
        self._names = StoreKeys(config.num_ranks)
        self._pool = IOPool(LOOKUP_THREADS, f"quire-kv-{tier}-lookup")
        self._deadlines = Deadlines(deadline)
        self._breaker = CircuitBreaker(failures=1)
        self._end_threads = weakref.finalize(self, close_all, self._deadlines, self._pool, store)
        self._lookups: dict[str, _Lookup] = {}
        self._calls: dict[int, float] = {}  # by thread, when the lookup began that is under way
        self._answers = _Answers()
        self._queue = ConfirmedSaves()
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
        self._saving: dict[int, int] = {}  # block -> the newest save that is copied off it
        self._meta = StoreMetadata()
        self._numbers = 0
        self._dropped = 0
        self._store_numbers: dict[str, float] = {}  # the worker's
        self._lookup_numbers: dict[str, float] = {}
        self._lookup_changes = 0
        self._stats = TierStats(tier)

    @property
    def wants_plan(self) -> bool:  # type: ignore[override]
        return bool(self._queue)

    def bind_scheduler(self, ask_again: Callable[[str], None]) -> None:
        self._ask_again = ask_again

    # Requests

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int | None, bool]:
        limit = request.num_tokens - 1
        stop = min(limit, len(request.block_hashes) * self._keys.hash_size)
        stop = stop // self._keys.alignment * self._keys.alignment
        if not self._loads or stop <= num_computed or num_computed % self._keys.alignment:
            return 0, False
        request_id = request.request_id
        lookup = self._lookups.get(request_id)
        if lookup is None:
            if not self._breaker.allows():
                return 0, False
            lookup = self._lookups[request_id] = _Lookup(request_id)
            wanted = self._keys.every(request.block_hashes, num_computed, stop)
            self._deadlines.add(functools.partial(self._answer, lookup, None))
            self._pool.submit(Urgency.LOOKUP, functools.partial(self._look_up, lookup, wanted, self._names))
            return None, True
        if lookup.found is None and not self._read_answer(request_id, lookup):
            return None, True
        assert lookup.found is not None
        lookup.start = num_computed
        found = self._keys.longest(request.block_hashes, num_computed, limit, lookup.found.__contains__)
        return found - num_computed, True

    def _look_up(self, lookup: _Lookup, wanted: list[BlockKey], names: StoreKeys) -> None:
        """In a thread."""
        if lookup.answered:
            return  # it had to wait for others too long
        found: set[BlockKey] = set()
        self._calls[threading.get_ident()] = time.monotonic()
        try:
            parts = self._store.contains([name for key in wanted for name in names.of_all_ranks(*key)])
            count = names.num_ranks
            found = {key for i, key in enumerate(wanted) if all(parts[i * count : (i + 1) * count])}
        finally:
            del self._calls[threading.get_ident()]
            self._answer(lookup, found)

    def _answer(self, lookup: _Lookup, found: set[BlockKey] | None) -> None:
        """In any thread. None: the time is over."""
        with self._answers.lock:
            if lookup.answered:
                return
            lookup.answered = True
            if self._lookups.get(lookup.request_id) is lookup:  # the request has not ended meanwhile
                self._answers.by_request[lookup.request_id] = found or set()
        if found is not None:
            if self._breaker.succeeded():
                logger.info("KV cache on %s: lookups are answered again", self.tier)
        else:
            self._store.stats.add(self._store.stats.lookups, errors=1)
            if self._hangs() and self._breaker.failed():
                logger.warning(
                    "KV cache on %s: a lookup took more than %g s and counts as a miss; tried again every now and then",
                    self.tier,
                    self._deadlines.seconds,
                )
        self._ask_again(lookup.request_id)

    def _hangs(self) -> bool:
        """Whether a call takes too long, rather than that too many requests wait for theirs."""
        late = time.monotonic() - self._deadlines.seconds / 2
        return self._breaker.is_open or any(began <= late for began in list(self._calls.values()))

    def _read_answer(self, request_id: str, lookup: _Lookup) -> bool:
        with self._answers.lock:
            lookup.found = self._answers.by_request.pop(request_id, None)
        if lookup.found is None:
            return False
        for key in lookup.found:
            self._know(key)
        return True

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None:
        lookup = self._end_lookup(request.request_id)
        if lookup is None or lookup.found is None:
            return
        stop = lookup.start + num_external
        self._stats.queries += request.num_tokens - lookup.start
        self._stats.hits += num_external
        self._stats.restored += num_external if request.num_cached >= 0 else 0
        # What it computes now was evicted from the store, if it ever was there.
        for key in self._keys.every(request.block_hashes, stop, len(request.block_hashes) * self._keys.hash_size):
            if key not in lookup.found:
                self._known.pop(key, None)
        needed = self._keys.needed(request.block_hashes, lookup.start, stop) if num_external else []
        if needed:
            blocks = [block_ids[group][position] for group, position, _ in needed]
            self._meta.loads.append(self._job(blocks, [key for _, _, key in needed], request.request_id))

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        self._end_lookup(request.request_id)
        return False

    def request_failed(self, request: ConnectorRequest) -> None:
        self._end_lookup(request.request_id)

    def _end_lookup(self, request_id: str) -> _Lookup | None:
        """Its answer may not have been read: others have computed the prefix meanwhile, or weights are new."""
        if request_id not in self._lookups:
            return None
        with self._answers.lock:
            self._answers.by_request.pop(request_id, None)
            return self._lookups.pop(request_id)

    # Blocks

    def block_registered(self, block_id: int, block_hash: bytes, group: int) -> None:
        key = (block_hash, group)
        if self._saves and key not in self._known:
            self._queue.add(block_id, key)

    def block_evicted(self, block_id: int, block_hash: bytes, group: int) -> None:
        if block_id in self._saving:
            self._meta.overwritten.append(self._saving.pop(block_id))
            self._stats.waits += 1
        self._queue.evict(block_id, (block_hash, group))

    def plan_succeeded(self, step: int) -> None:
        self._queue.confirm(step)

    def reset_cache(self) -> None:
        self._queue.clear()
        # Blocks are nobody's now, and evicted by no one: whatever the next plan overwrites waits for their copies.
        self._meta.overwritten += dict.fromkeys(self._saving.values())
        self._saving.clear()

    def forget(self) -> None:
        # What is stored stays right for engines with the weights it was computed with.
        self._names = StoreKeys(self.config.num_ranks, secrets.token_bytes(16))
        self._known.clear()
        for lookup in self._lookups.values():
            lookup.found = set()

    # Plans

    def build_connector_meta(self, plan: SchedulerOutput) -> StoreMetadata | None:
        taken = {key: block for key, block in self._queue.take(plan.step).items() if key not in self._known}
        meta, self._meta = self._meta, StoreMetadata()
        if taken:
            job = self._job(list(taken.values()), list(taken))
            meta.saves.append(job)
            for key in taken:
                self._know(key)
            if self._asynchronous:
                self._saving.update(dict.fromkeys(job.blocks, job.number))
        return meta if meta.saves or meta.loads or meta.overwritten or meta.ended else None

    def _job(self, blocks: list[int], keys: list[BlockKey], request_id: str | None = None) -> BlockJob:
        self._numbers += 1
        return BlockJob(self._numbers, blocks, keys, self._names.salt, request_id)

    def _know(self, key: BlockKey) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def worker_reported(self, report: ConnectorReport) -> None:
        assert isinstance(report, StoreReport)
        self._dropped += report.dropped
        for key in report.lost:
            self._known.pop(key, None)
        self._store_numbers = report.store
        if self._asynchronous:
            ended = set(report.ended)
            self._saving = {block: number for block, number in self._saving.items() if number not in ended}
            self._meta.ended += report.ended

    def stats(self) -> TierStats:
        stats, own = self._stats, self._store.stats
        if own.num_changes != self._lookup_changes:
            self._lookup_changes, self._lookup_numbers = own.num_changes, own.summary()
        numbers, lookups = self._store_numbers, self._lookup_numbers
        stats.saved_blocks = int(numbers.get("write_hits", 0))
        stats.saved_bytes = int(numbers.get("write_bytes", 0))
        stats.save_seconds = numbers.get("write_seconds", 0.0)
        stats.loaded_blocks = int(numbers.get("read_hits", 0))
        stats.loaded_bytes = int(numbers.get("read_bytes", 0))
        stats.load_seconds = numbers.get("read_seconds", 0.0)
        stats.dropped_blocks = {"busy": self._dropped, "evicted": self._queue.num_dropped}
        stats.errors = {
            "lookup": int(lookups.get("lookup_errors", 0)),
            "load": int(numbers.get("read_errors", 0)),
            "save": int(numbers.get("write_errors", 0)),
        }
        stats.latencies = {
            name: {p: numbers_of[f"{key}_p{p}"] for p in PERCENTILES if f"{key}_p{p}" in numbers_of}
            for name, key, numbers_of in (
                ("lookup", "lookup", lookups),
                ("load", "read", numbers),
                ("save", "write", numbers),
            )
        }
        return stats

    def close(self) -> None:
        self._end_threads()
