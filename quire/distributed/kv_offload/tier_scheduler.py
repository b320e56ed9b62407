"""The scheduler's side of the CPU tier: which blocks are saved to which slots of host memory, and loaded from there."""

from dataclasses import dataclass

import numpy as np

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.block_keys import BlockKey, BlockKeys
from quire.distributed.kv_offload.eviction import POLICIES
from quire.distributed.kv_offload.metadata import CopyJob, OffloadMetadata, OffloadReport
from quire.distributed.kv_offload.save_queue import SaveQueue
from quire.distributed.kv_offload.slot_index import SlotIndex
from quire.messages.connector import ConnectorRequest
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.kv_transfer import ConnectorReport, TierStats
from quire.messages.plan import SchedulerOutput

MAX_SAVING_BYTES = 1 << 30  # in flight at a time, so that a step that must wait for them waits for milliseconds
MAX_URGENT_BYTES = 1 << 25  # of blocks that a plan overwrites: what is read off them without waiting for the host
MIN_SAVED_BLOCKS = 16  # at a time, unless they have waited for so many plans
MAX_PLANS_WAITED = 8


@dataclass(slots=True)
class _Copies:
    """A job that has not ended."""

    keys: list[BlockKey]
    job: CopyJob


class TierScheduler(KVConnector):
    """Every block is saved soon after the plan that computed it, long before it is evicted: by then it is late.

    `asynchronous`: copies overlap steps, so that a slot can be loaded from, and a block's content is safe, only when
    the worker's side says so. A plan that overwrites a block which is being saved waits for it on the device. That is
    rare, since blocks are evicted in the order of their last use, and short, since little is in flight; a reference
    would keep the block from whoever needs it now. A block that is evicted before its copy has begun is not saved if
    others are in flight, because its plan would have to wait for all of them.

    Otherwise copies are part of the plan, in order: saves, then loads.
    """

    hears_registered = True
    tier = "cpu"

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KVCacheConfig,
        num_slots: int,
        slot_bytes: int,
        policy: str,
        asynchronous: bool,
    ) -> None:
        super().__init__(config, layout, "scheduler")
        self.asynchronous = asynchronous
        self.index = SlotIndex(POLICIES[policy]())
        self.queue = SaveQueue()
        self._stats = TierStats(self.tier)
        self._keys = BlockKeys(layout)
        self._slot_bytes = slot_bytes
        self._meta = OffloadMetadata()
        self._jobs: dict[int, _Copies] = {}
        self._saving: dict[int, int] = {}  # block -> the newest save in flight that reads it
        self._numbers = 0
        self._plans_waited = 0
        self._asked = ("", 0)  # the request that was looked up last, and what it had
        if not asynchronous:
            self.index.grow(num_slots)

    # Requests

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed: int) -> tuple[int, bool]:
        if self.queue.evicted and not self.asynchronous:
            # Saves come before loads, so what this plan has evicted so far can be found. Not later: what is found must
            # not be given up until the request has its blocks.
            self._save(self.queue.take_evicted())
        self._asked = (request.request_id, num_computed)
        stop = self._keys.longest(request.block_hashes, num_computed, request.num_tokens - 1, self.index.holds)
        return stop - num_computed, self.asynchronous

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: list[list[int]], num_external: int
    ) -> None:
        (request_id, start), self._asked = self._asked, ("", 0)
        if request_id != request.request_id:
            return  # it reads no cache
        stats, hashes, stop = self._stats, request.block_hashes, start + num_external
        stats.queries += request.num_tokens - start
        stats.hits += num_external
        stats.restored += num_external if request.num_cached >= 0 else 0
        # A prefix is as useful as its first blocks: the last ones are given up first.
        for group, first, keys in reversed(self._keys.needed_by_group(hashes, 0, start)):
            if missing := self.index.use(reversed(keys)):  # given up here while it was used there
                block_of = dict(zip(keys, block_ids[group][first:], strict=False))
                for key in missing:
                    self.queue.add(block_of[key], key)
        loaded: list[BlockKey] = []
        blocks: list[int] = []
        for group, first, keys in self._keys.needed_by_group(hashes, start, stop):
            loaded += keys
            blocks += block_ids[group][first : first + len(keys)]
        if loaded:
            self._meta.loads.append(self._start(loaded, blocks, self.index.read(loaded), request_id))

    def request_finished(self, request: ConnectorRequest, block_ids: list[list[int]]) -> bool:
        end = len(request.block_hashes) * self._keys.hash_size // self._keys.alignment * self._keys.alignment
        for _, _, keys in reversed(self._keys.needed_by_group(request.block_hashes, 0, end)):
            self.index.renew(reversed(keys))
        return False

    # Blocks

    def block_registered(self, block_id: int, block_hash: bytes, group: int) -> None:
        key = (block_hash, group)
        if key not in self.index:
            self.queue.add(block_id, key)

    def block_evicted(self, block_id: int, block_hash: bytes, group: int) -> None:
        key = (block_hash, group)
        if block_id in self._saving:
            self._meta.overwritten.append(self._saving.pop(block_id))
            self._stats.waits += 1
        elif self.queue.evict(block_id, key) and self.asynchronous and self._would_wait():
            del self.queue.evicted[key]
            self._drop("busy", 1)

    def _would_wait(self) -> bool:
        """Whether a plan would have to wait for those blocks that it overwrites."""
        return bool(self._saving) or len(self.queue.evicted) * self._slot_bytes > MAX_URGENT_BYTES

    def reset_cache(self) -> None:
        self.queue.clear()
        self.index.clear()

    # Plans

    def build_connector_meta(self, plan: SchedulerOutput) -> OffloadMetadata | None:
        if self.asynchronous:
            urgent = len(self.queue.evicted)
            taken = self.queue.take(self._save_limit())
            self._save(taken)
            if urgent and self._meta.saves:
                self._meta.overwritten.append(self._meta.saves[-1].number)
        else:
            self._save(self.queue.take())
        meta, self._meta = self._meta, OffloadMetadata()
        if not self.asynchronous:
            for job in (*meta.saves, *meta.loads):
                self._end(job.number)
            meta.saves = _merged(meta.saves)
        return meta if meta.saves or meta.loads or meta.overwritten or meta.ended else None

    def _save_limit(self) -> int:
        """How many blocks to save with this plan, beside those that it overwrites."""
        if not self.index.num_slots or not self.queue.num_ready:
            return 0
        self._plans_waited += 1
        if self.queue.num_ready < MIN_SAVED_BLOCKS and self._plans_waited < MAX_PLANS_WAITED:
            return 0
        self._plans_waited = 0
        return max(0, MAX_SAVING_BYTES // self._slot_bytes - len(self._saving))

    def _save(self, blocks: dict[BlockKey, int]) -> None:
        keys = [key for key in blocks if key not in self.index]
        slots = self.index.write(keys)
        if len(slots) < len(keys):
            self._drop("full" if self.index.num_slots else "not_ready", len(keys) - len(slots))
            keys = keys[: len(slots)]
        if not keys:
            return
        job = self._start(keys, [blocks[key] for key in keys], slots)
        self._meta.saves.append(job)
        self._stats.saved_blocks += len(keys)
        if self.asynchronous:
            self._saving.update(dict.fromkeys(job.blocks.tolist(), job.number))
        else:
            self.index.written(keys, slots)

    def _drop(self, reason: str, count: int) -> None:
        dropped = self._stats.dropped_blocks
        dropped[reason] = dropped.get(reason, 0) + count

    def _start(self, keys: list[BlockKey], blocks: list[int], slots: list[int], request: str | None = None) -> CopyJob:
        self._numbers += 1
        job = CopyJob(self._numbers, np.array(blocks, np.int64), np.array(slots, np.int64), request)
        self._jobs[job.number] = _Copies(keys, job)
        return job

    def _end(self, number: int) -> None:
        """The job's slots and blocks are no longer used by it."""
        copies = self._jobs.pop(number, None)
        if copies is None:
            return
        slots = copies.job.slots.tolist()
        if copies.job.request_id is not None:
            self._stats.loaded_blocks += len(slots)
            self.index.done_reading(copies.keys, slots)
        elif self.asynchronous:
            self.index.written(copies.keys, slots)
            for block in copies.job.blocks.tolist():
                if self._saving.get(block) == number:
                    del self._saving[block]

    def worker_reported(self, report: ConnectorReport) -> None:
        assert isinstance(report, OffloadReport)
        if self.asynchronous:
            self.index.grow(report.num_slots)
            for number in report.ended:
                self._end(number)
            self._meta.ended += report.ended
        stats = self._stats
        stats.saved_bytes += report.saved_bytes
        stats.save_seconds += report.save_seconds
        stats.loaded_bytes += report.loaded_bytes
        stats.load_seconds += report.load_seconds

    def stats(self) -> TierStats:
        self._stats.blocks, self._stats.capacity = len(self.index), self.index.num_slots
        self._stats.evicted_blocks = self.index.num_evicted
        return self._stats


def _merged(saves: list[CopyJob]) -> list[CopyJob]:
    """One job for all. Where several have the same slot, whose first content was given up at once, the last counts."""
    if len(saves) < 2:
        return saves
    blocks: dict[int, int] = {}
    for job in saves:
        blocks |= zip(job.slots.tolist(), job.blocks.tolist(), strict=True)
    slots = np.fromiter(blocks, np.int64)
    return [CopyJob(saves[-1].number, np.fromiter(blocks.values(), np.int64), slots)]
