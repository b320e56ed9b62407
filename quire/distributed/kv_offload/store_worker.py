"""The worker's side of a store connector: blocks between the device, host memory and the store."""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.block_keys import BlockKey
from quire.distributed.kv_offload.block_store import BlockStore, StoreKeys
from quire.distributed.kv_offload.copier import Copier, OrderedCopier
from quire.distributed.kv_offload.deadlines import Deadlines
from quire.distributed.kv_offload.io_pool import IOPool, Urgency, close_all
from quire.distributed.kv_offload.metadata import CopyJob
from quire.distributed.kv_offload.page_writer import PageWriter, make_page_writer
from quire.distributed.kv_offload.staging import StagingMemory
from quire.distributed.kv_offload.store_metadata import BlockJob, StoreMetadata, StoreReport
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.kv_transfer import ConnectorMetadata, FinishedTransfers

logger = logging.getLogger("quire")

STAGING_BYTES = 1 << 28  # of blocks that are to be written to the store; more are dropped
BATCH_BYTES = 1 << 22  # of blocks that a thread reads or writes at a time
MIN_SLOTS = 16


class _Load:
    """Blocks of a request, which several threads read; it ends with the last of them."""

    def __init__(self, request_id: str, num_batches: int, writable: object) -> None:
        self.request_id = request_id
        self.left = num_batches
        self.failed = False  # nothing is written to its blocks any more
        self.reported = False
        self.num_writing = 0  # threads that write to its blocks
        self.writable = writable  # PageWriter.mark(): when the blocks may be written


class StoreWorker(KVConnector):
    """Threads read blocks from the store and write them into the cache, whose blocks are the waiting request's alone.
    Blocks to be saved are copied to host memory in the order of plans, and written to the store when it has time: if
    it has too little, they are dropped.

    Reads that take longer than `deadline` seconds have failed: their threads may hang, and will not write any more."""

    def __init__(
        self,
        config: ConnectorConfig,
        layout: KVCacheConfig,
        store: BlockStore,
        num_threads: int,
        asynchronous: bool,
        deadline: float = 60.0,
    ) -> None:
        super().__init__(config, layout, "worker")
        self._deadlines = Deadlines(deadline)
        self._store = store
        self._asynchronous = asynchronous
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._loads: set[_Load] = set()  # not reported yet
        self._received: list[str] = []
        self._failed: dict[str, str] = {}
        self._report = StoreReport()
        self._reported = 0  # changes of the store's statistics

    def bind_pages(self, pages: Sequence[Any]) -> None:
        self._pages: list[torch.Tensor] = list(pages)

    def bind(self, kv_caches: Mapping[int, Any], notify: Callable[[], None]) -> None:
        self._notify = notify
        self.memory = StagingMemory(self._pages, 1)
        self._batch = max(1, BATCH_BYTES // self.memory.stride)
        self.memory = StagingMemory(self._pages, max(MIN_SLOTS, STAGING_BYTES // self.memory.stride))
        self._free = list(range(self.memory.num_slots - 1, -1, -1))
        self._store.register_buffers(self.memory.memory)
        self._copier = self._make_copier()
        self._writer: PageWriter = make_page_writer(self._pages)
        self._buffers = threading.local()  # one for each thread that reads
        self._pool = IOPool(self._num_threads)
        self._end_threads = weakref.finalize(self, close_all, self._deadlines, self._pool, self._store)

    def _make_copier(self) -> Copier:
        if not self._asynchronous:
            return OrderedCopier(self._pages, self.memory)
        from quire.distributed.kv_offload.stream_copier import StreamCopier

        return StreamCopier(self._pages, self.memory, self._notify)

    # Steps

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        assert isinstance(meta, StoreMetadata)
        try:
            for number in meta.ended:
                self._copier.rely_on(number)
            for job in meta.saves:
                self._save(job)
            for number in meta.overwritten:
                self._copier.let_overwrite(number)
            for job in meta.loads:
                self._load(job)
        except BaseException:
            self._abandon_loads()
            raise

    def get_finished(self) -> FinishedTransfers:
        ended = tuple(job.number for job, _ in self._copier.ended())
        with self._lock:
            received, failed, report = tuple(self._received), self._failed, self._report
            self._received, self._failed, self._report = [], {}, StoreReport()
        report.ended += ended
        changes = self._store.stats.num_changes
        if changes == self._reported and not (report.ended or report.dropped or report.lost):
            return FinishedTransfers(received=received, failed=failed)
        self._reported = changes
        report.store = self._store.stats.summary()
        return FinishedTransfers(received=received, failed=failed, reports=(report,))

    def close(self) -> None:
        """Blocks that were copied are still written."""
        self._end_threads()
        self._copier.close()

    # Saves

    def _save(self, job: BlockJob) -> None:
        with self._lock:
            count = min(len(job.blocks), len(self._free))
            slots = sorted(self._free.pop() for _ in range(count))
            self._report.dropped += len(job.blocks) - count
            if not count:
                self._report.ended += (job.number,)
                return
        try:
            self._copier.save(CopyJob(job.number, np.array(job.blocks[:count], np.int64), np.array(slots, np.int64)))
        except BaseException:
            with self._lock:
                self._free += slots
            raise
        for start in range(0, count, self._batch):
            part = slice(start, min(count, start + self._batch))
            self._pool.submit(
                Urgency.WRITE, functools.partial(self._write, job.number, self._names(job, part), slots[part])
            )

    def _write(self, number: int, names: list[bytes], slots: list[int]) -> None:
        try:
            self._copier.wait(number)
            self._store.put(names, [self.memory.buffer(slot) for slot in slots])
        finally:
            with self._lock:
                self._free += slots

    # Loads

    def _load(self, job: BlockJob) -> None:
        assert job.request_id is not None
        starts = range(0, len(job.blocks), self._batch)
        load = _Load(job.request_id, len(starts), self._writer.mark())
        with self._lock:
            self._loads.add(load)
        self._deadlines.add(functools.partial(self._expire, load))
        for start in starts:
            part = slice(start, start + self._batch)
            self._pool.submit(Urgency.READ, functools.partial(self._read, load, job, part))

    def _read(self, load: _Load, job: BlockJob, part: slice) -> None:
        names, done, lost = self._names(job, part), False, []
        try:
            if not load.failed:
                memory = self._read_buffer()
                found = self._store.get(names, [memory.buffer(i) for i in range(len(names))])
                lost = [key for key, hit in zip(job.keys[part], found, strict=True) if not hit]
                done = not lost and self._write_blocks(load, memory, job.blocks[part])
        except Exception:
            logger.exception("blocks of the KV cache could not be loaded")
        finally:
            self._end(load, done, lost)

    def _write_blocks(self, load: _Load, memory: StagingMemory, blocks: list[int]) -> bool:
        """Unless the load has failed meanwhile: its blocks may be others' by now."""
        with self._lock:
            if load.failed:
                return False
            load.num_writing += 1
        try:
            self._writer.write(memory, blocks, load.writable)
        finally:
            with self._lock:
                load.num_writing -= 1
                self._written.notify_all()
        return True

    def _end(self, load: _Load, done: bool, lost: list[BlockKey]) -> None:
        with self._lock:
            self._report.lost += lost
            load.failed |= not done
            load.left -= 1
            if not load.left:
                self._tell(load, "the KV cache's store no longer has all of its blocks")

    def _expire(self, load: _Load) -> None:
        """The time for the load is over."""
        with self._lock:
            if load.reported:
                return
            self._stop(load)
            self._tell(load, f"the KV cache's store took more than {self._deadlines.seconds:g} s")
        self._store.stats.add(self._store.stats.reads, errors=1)
        logger.warning("KV cache: blocks could not be read within %g s, and are computed", self._deadlines.seconds)

    def _abandon_loads(self) -> None:
        """Of a connector that raises all transfers end, and their blocks are freed: nothing is written any more."""
        with self._lock:
            for load in self._loads:
                self._stop(load)
                load.reported = True
            self._loads.clear()

    def _stop(self, load: _Load) -> None:
        load.failed = True
        while load.num_writing:  # from memory to memory, which does not hang
            self._written.wait()

    def _tell(self, load: _Load, failure: str) -> None:
        """With the lock held."""
        if load.reported:
            return
        load.reported = True
        self._loads.discard(load)
        if load.failed:
            self._failed[load.request_id] = failure
        else:
            self._received.append(load.request_id)
        self._notify()

    def _read_buffer(self) -> StagingMemory:
        """This thread's own."""
        memory: StagingMemory | None = getattr(self._buffers, "memory", None)
        if memory is None:
            memory = self._buffers.memory = StagingMemory(self._pages, self._batch)
            self._store.register_buffers(memory.memory)
        return memory

    def _names(self, job: BlockJob, part: slice) -> list[bytes]:
        keys = StoreKeys(self.config.num_ranks, job.salt)
        return [keys.key(block_hash, group, self.config.rank) for block_hash, group in job.keys[part]]
