"""The CPU tier with copies in threads, in place of a GPU's streams: what overlaps steps there does so here."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from quire.distributed.kv_connector import KVConnector
from quire.distributed.kv_offload.copier import OrderedCopier
from quire.distributed.kv_offload.folder_store import FolderStore
from quire.distributed.kv_offload.offloading import read_options
from quire.distributed.kv_offload.store_scheduler import StoreScheduler
from quire.distributed.kv_offload.store_worker import StoreWorker
from quire.distributed.kv_offload.tier_scheduler import TierScheduler
from quire.distributed.kv_offload.tier_worker import TierWorker


class ThreadedCopier:
    """A thread for each direction. `gate`: copies begin once it is open, or a step has to wait for them."""

    def __init__(self, pages, memory, notify: Callable[[], None]) -> None:
        self._copy = OrderedCopier(pages, memory)
        self._notify = notify
        self._saves, self._loads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._launched: dict[int, Future[None]] = {}
        self._unreported: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()

    def save(self, job) -> None:
        self._launch(job, self._saves.submit(self._run, self._copy.save, job))

    def load(self, job) -> None:
        future = self._loads.submit(self._run, self._copy.load, job)
        future.add_done_callback(lambda _: self._notify())
        self._launch(job, future)

    def _launch(self, job, future) -> None:
        self._launched[job.number] = future
        self._unreported.append((job, future))

    def _run(self, copy, job) -> None:
        self.gate.wait(60)
        time.sleep(0.001)  # a copy takes its time
        copy(job)

    def let_overwrite(self, number) -> None:
        if number in self._launched:
            self.gate.set()
            self._launched[number].result()

    def rely_on(self, number) -> None:
        future = self._launched.pop(number, None)
        assert future is None or future.done()

    def ended(self):
        done = [(job, future) for job, future in self._unreported if future.done()]
        self._unreported = [one for one in self._unreported if one not in done]
        return [(job, 0.001) for job, future in done if future.result() is None]

    def wait(self, number) -> None:
        future = self._launched.get(number)
        if future is not None:
            future.result()

    def drain(self) -> None:
        self.gate.set()
        for _, future in self._unreported:
            future.result()

    def close(self) -> None:
        self.drain()


class ThreadedWorker(TierWorker):
    def make_copier(self, notify):
        return ThreadedCopier(self._pages, self.memory, notify)


def threaded_tier(config, layout, role) -> KVConnector:
    num_bytes, policy = read_options(config.extra)
    slot_bytes = layout.num_tensors * layout.page_bytes
    num_slots = num_bytes // slot_bytes
    if role == "scheduler":
        return TierScheduler(config, layout, num_slots, slot_bytes, policy, asynchronous=True)
    return ThreadedWorker(config, layout, num_slots, asynchronous=True)


class ThreadedStoreWorker(StoreWorker):
    def _make_copier(self):
        return ThreadedCopier(self._pages, self.memory, self._notify)


def threaded_store(config, layout, role) -> KVConnector:
    """A folder, to which blocks are copied as off a GPU."""
    store = FolderStore(Path(config.extra["folder"]), 1 << 30, tidies=role == "worker")
    if role == "scheduler":
        return StoreScheduler(config, layout, store, "disk", asynchronous=True)
    return ThreadedStoreWorker(config, layout, store, num_threads=2, asynchronous=True)
