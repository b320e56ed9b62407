"""The worker's side of the CPU tier: host memory, and copies between it and the device's blocks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.copier import Copier, OrderedCopier
from quire.distributed.kv_offload.host_memory import HostMemory
from quire.distributed.kv_offload.metadata import CopyJob, OffloadMetadata, OffloadReport
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.kv_transfer import ConnectorMetadata, FinishedTransfers
from quire.platforms.host_claims import HostClaims


class TierWorker(KVConnector):
    def __init__(self, config: ConnectorConfig, layout: KVCacheConfig, num_slots: int, asynchronous: bool) -> None:
        super().__init__(config, layout, "worker")
        self._num_slots = num_slots
        self._asynchronous = asynchronous
        self._num_reported = 0
        self._failed: list[CopyJob] = []  # not started, and not to be waited for

    def bind_pages(self, pages: Sequence[Any]) -> None:
        self._pages: Sequence[torch.Tensor] = pages

    def bind(self, kv_caches: Mapping[int, Any], notify: Callable[[], None]) -> None:
        claim = functools.partial(HostClaims().take, shrinks=self.config.shrinks)
        self.memory = HostMemory(self._pages, self._num_slots, pinned=self._pages[0].is_cuda, claim=claim)
        self.copier = self.make_copier(notify)

    def make_copier(self, notify: Callable[[], None]) -> Copier:
        if not self._asynchronous:
            return OrderedCopier(self._pages, self.memory)
        from quire.distributed.kv_offload.stream_copier import StreamCopier

        return StreamCopier(self._pages, self.memory, notify)

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        assert isinstance(meta, OffloadMetadata)
        left = [*meta.loads, *reversed(meta.saves)]
        try:
            for number in meta.ended:
                self.copier.rely_on(number)
            for job in meta.saves:
                self.copier.save(job)
                left.remove(job)
            for number in meta.overwritten:
                self.copier.let_overwrite(number)
            for job in meta.loads:
                self.copier.load(job)
                left.remove(job)
        except BaseException:
            # All transfers end with this: the scheduler's side must not wait for any.
            self.copier.drain()
            self._failed += left
            raise

    def get_finished(self) -> FinishedTransfers:
        report = OffloadReport(num_slots=self.memory.num_ready)
        ended = self.copier.ended()
        for job, seconds in ended:
            num_bytes = len(job.slots) * self.memory.slot_bytes
            if job.request_id is None:
                report.saved_bytes += num_bytes
                report.save_seconds += seconds
            else:
                report.loaded_bytes += num_bytes
                report.load_seconds += seconds
        jobs, self._failed = [job for job, _ in ended] + self._failed, []
        report.ended = tuple(job.number for job in jobs)
        if not jobs and report.num_slots == self._num_reported:
            return FinishedTransfers()
        self._num_reported = report.num_slots
        waited = tuple(job.request_id for job in jobs if job.request_id is not None and self._asynchronous)
        return FinishedTransfers(received=waited, reports=(report,))

    def close(self) -> None:
        try:
            self.copier.close()
        finally:
            self.memory.close()
