"""The fake engine of the scheduler's tests with a CPU tier, whose copies end as late as they may."""

import numpy as np

from quire.core.kv_transfers import KVTransfers
from quire.distributed.kv_offload.metadata import OffloadReport
from quire.distributed.kv_offload.tier_scheduler import TierScheduler
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup
from quire.messages.kv_transfer import FinishedTransfers
from tests.core.fake_engine import FakeEngine, FakeWorker, spec


class TieredWorker(FakeWorker):
    """In order: saves and loads happen when a plan says so. Otherwise as late as possible: when `lands` says so, or
    when a plan overwrites what is saved. So a slot or block that is used too early is found out."""

    def __init__(self, config, kv, max_model_len, num_slots, asynchronous, lands):
        super().__init__(config, kv, max_model_len)
        self.slots = np.full((num_slots, self.page, 2), -1, np.int64)
        self.asynchronous, self.lands = asynchronous, lands
        self.num_ready = 0 if asynchronous else num_slots
        self.saving, self.loading = {}, {}  # jobs, by number; in the order of their streams
        self.staged = {}  # what was read of a save's blocks

    def _pages(self, blocks):
        return (np.asarray(blocks)[:, None] * self.page + np.arange(self.page)).reshape(-1)

    def _read(self, job):
        if job.number not in self.staged:
            self.staged[job.number] = self.cache[self._pages(job.blocks)].reshape(-1, self.page, 2)

    def _save(self, job):
        self._read(job)
        self.slots[job.slots] = self.staged.pop(job.number)

    def _load(self, job):
        self.cache[self._pages(job.blocks)] = self.slots[job.slots].reshape(-1, 2)

    def run(self, plan):
        (meta,) = plan.connector_meta
        report, received = OffloadReport(), []
        if meta is not None:
            assert not set(meta.ended) & (self.saving.keys() | self.loading.keys())
            self.saving |= {job.number: job for job in meta.saves}
            if not self.asynchronous:
                self._end(self.saving, self._save)
            for number in meta.overwritten:
                if number in self.saving:
                    self._read(self.saving[number])
            self.loading |= {job.number: job for job in meta.loads}
            if not self.asynchronous:
                self._end(self.loading, self._load)
        output = super().run(plan)
        if self.asynchronous:
            report, received = self.end_some()
        output.transfers = (FinishedTransfers(received=tuple(received), reports=(report,)),)
        return output

    def end_some(self):
        """What a worker reports: jobs that have ended by now."""
        self.num_ready = min(len(self.slots), self.num_ready + 1 + len(self.slots) // 2)
        received = [job.request_id for job in self.loading.values()]
        ended = [*self._end(self.loading, self._load, self.lands), *self._end(self.saving, self._save, self.lands)]
        received = received[: len(received) - len(self.loading)]
        return OffloadReport(ended=tuple(ended), num_slots=self.num_ready), received

    @staticmethod
    def _end(jobs, copy, lands=lambda: True):
        ended = []
        for number in list(jobs):
            if not lands():
                break
            copy(jobs.pop(number))
            ended.append(number)
        return ended


class TieredEngine(FakeEngine):
    def __init__(
        self, num_slots=64, asynchronous=False, eviction="lru", lands=lambda: True, specs=None, **kwargs
    ) -> None:
        specs = specs or [spec()]
        layout = KVCacheConfig(1, tuple(KVCacheGroup((i,), s) for i, s in enumerate(specs)))
        self.tier = TierScheduler(None, layout, num_slots, 1 << 20, eviction, asynchronous)
        super().__init__(specs=specs, connector=self.tier, **kwargs)
        given, before = (KVCacheConfig(self.kv.pool.num_blocks, layout.groups), self.kv), self.worker
        self.worker = TieredWorker(*given, before.max_model_len, num_slots, asynchronous, lands)
        self.worker.__dict__ |= {name: getattr(before, name) for name in ("propose", "num_drafts", "finds")}

    @property
    def transfers(self) -> KVTransfers:
        return self.scheduler.transfers

    def step(self) -> None:
        if not self.in_flight and self.transfers.pending:
            self.transfers.notify()  # a thread of the worker's does, once a load has ended
        super().step()

    def check_tier(self) -> None:
        """Once all jobs have ended every slot is free or held, and holds what its key says."""
        self.worker.lands = lambda: True
        report, _ = self.worker.end_some()
        self.tier.worker_reported(report)
        index = self.tier.index
        assert index.num_busy == 0 and not self.tier._jobs and not self.tier._saving
        slots = [*index._held.values(), *index._free]
        assert sorted(slots) == list(range(index.num_slots))
