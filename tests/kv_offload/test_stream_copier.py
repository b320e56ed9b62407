"""The copies of a GPU, with streams and events that do everything at once: what goes where, in parts and runs."""

import contextlib
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.distributed.kv_offload import stream_copier
from quire.distributed.kv_offload.copier import OrderedCopier
from quire.distributed.kv_offload.host_memory import HostMemory
from quire.distributed.kv_offload.metadata import CopyJob
from quire.distributed.kv_offload.staging import StagingMemory
from quire.distributed.kv_offload.stream_copier import StreamCopier


class Event:
    def __init__(self, **_):
        self.recorded = False

    def record(self, stream=None):
        self.recorded = True

    def query(self):
        return self.recorded

    def synchronize(self):
        assert self.recorded

    def elapsed_time(self, other):
        return 2.0


class Stream:
    def __init__(self, device=None):
        self.waited = []

    def wait_event(self, event):
        assert event.recorded
        self.waited.append(event)

    def synchronize(self):
        pass


@pytest.fixture
def compute(monkeypatch):
    """The stream of the steps."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def in_parts(memory, slots_per_part):
    """As pinned memory is."""
    memory.parts = list(memory.parts[0].split(slots_per_part))
    memory.slots_per_part = slots_per_part
    return memory


def random_pages(num_blocks=40, num_layers=3, page=5):
    return [torch.randint(0, 1000, (num_blocks, page)) for _ in range(num_layers)]


def job(number, blocks, slots, request=None):
    return CopyJob(number, np.array(blocks), np.array(slots), request)


def test_neighbouring_slots_are_one_copy_within_a_part():
    memory = in_parts(HostMemory(random_pages(), 10, pinned=False), 4)
    runs = [(at, len(view)) for at, view in memory.runs(np.array([2, 3, 4, 5, 7, 1, 0]))]
    assert runs == [(0, 2), (2, 2), (4, 1), (5, 1), (6, 1)]
    assert memory.num_ready == 10


def aligned(kernel):
    """As given to the kernels: Triton compiles others for pointers that are not, while a step waits."""

    def call(pages, table, blocks, buffer, start=0):
        assert blocks.data_ptr() % 16 == buffer.data_ptr() % 16 == 0
        kernel(pages, table, blocks, buffer, start)

    return call


@pytest.mark.parametrize("staged", [1, 2, 3, 100])
def test_blocks_come_back_as_they_were_saved(compute, monkeypatch, staged):
    for name in ("gather_blocks", "scatter_blocks"):
        monkeypatch.setattr(stream_copier, name, aligned(getattr(stream_copier, name)))
    pages, told = random_pages(), threading.Event()
    memory = in_parts(HostMemory(pages, 20, pinned=False), 7)
    monkeypatch.setattr(stream_copier, "STAGING_BYTES", staged * memory.slot_bytes)
    copier = StreamCopier(pages, memory, told.set)
    draw = np.random.default_rng(0)
    blocks, slots, others = (draw.permutation(range(1, 20))[:13] for _ in range(3))
    others += 20
    before = [one.clone() for one in pages]
    copier.save(job(1, blocks, slots))
    copier.let_overwrite(1)
    assert len(compute.waited) == 1
    for one in pages:
        one[1:] = -1
    copier.load(job(2, others, slots, "a"))
    assert told.wait(60)
    for one, old in zip(pages, before, strict=True):
        assert torch.equal(one[others], old[blocks])
        assert (one[[i for i in range(1, 40) if i not in others]] == -1).all()
    assert [(one.number, seconds) for one, seconds in copier.ended()] == [(1, 0.002), (2, 0.002)]
    assert copier.ended() == []
    copier.rely_on(1)
    copier.rely_on(2)
    copier.rely_on(2)
    copier.let_overwrite(1)
    assert len(compute.waited) == 3, "another rank's step waits for its own copies, once"
    copier.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_blocks_pass_through_slots_with_gaps(compute, monkeypatch, pinned):
    """As a store reads them: its slots fill pages of memory, which blocks may not."""
    pages = random_pages()
    memory = StagingMemory(pages, 20)
    assert memory.stride == 4096 > memory.slot_bytes
    copier = StreamCopier(pages, memory, lambda: None) if pinned else OrderedCopier(pages, memory)
    copier.save(job(1, [3, 7, 9], [4, 5, 11]))
    for block, slot in ((3, 4), (7, 5), (9, 11)):
        content = torch.cat([one[block] for one in pages]).numpy().tobytes()
        assert bytes(memory.buffer(slot))[: memory.slot_bytes] == content
    before = [one.clone() for one in pages]
    for one in pages:
        one[1:] = -1
    copier.load(job(2, [20, 21, 22], [11, 4, 5]))
    for one, old in zip(pages, before, strict=True):
        assert torch.equal(one[20:23], old[[9, 3, 7]])
    for _, slots in memory.runs(np.array([4, 5, 6])):
        assert slots.is_contiguous()
    copier.close()


def test_a_copier_waits_before_its_memory_is_freed(compute, monkeypatch):
    waited = []
    monkeypatch.setattr(Stream, "synchronize", lambda stream: waited.append(stream))
    pages = random_pages()
    copier = StreamCopier(pages, HostMemory(pages, 20, pinned=False), lambda: None)
    copier.close()
    copier.close()
    assert len(waited) == 2
    del copier
    gc.collect()
    assert len(waited) == 2
    StreamCopier(pages, HostMemory(pages, 20, pinned=False), lambda: None)
    gc.collect()
    assert len(waited) == 4, "one that nobody closed"


def test_staging_memory_of_a_gpu_is_unpinned(monkeypatch):
    pinned = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}) or 0,
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    page = SimpleNamespace(shape=(40, 5), dtype=torch.int64, is_cuda=True)
    memory = StagingMemory([page] * 3, 6)
    assert list(pinned.values()) == [6 * 4096]
    del memory
    gc.collect()
    assert not pinned
