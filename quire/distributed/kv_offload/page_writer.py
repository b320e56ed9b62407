"""Writes blocks that were read from a store into the device's cache, from any thread, beside the steps."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.distributed.kv_offload.staging import StagingMemory


class PageWriter(Protocol):
    def mark(self) -> object:
        """Called in the order of plans: blocks that are free from here on may be written behind it."""
        ...

    def write(self, source: StagingMemory, blocks: Sequence[int], mark: object) -> None:
        """From its first slots, which can be reused when this returns; steps that are started later read the blocks."""
        ...


class HostPageWriter:
    """Plans have run when the next is started, so there is nothing to wait for. By numpy: torch would give every
    thread that copies a pool of threads of its own, beside those that compute."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = [page.numpy() for page in pages]

    def mark(self) -> None: ...

    def write(self, source: StagingMemory, blocks: Sequence[int], mark: object) -> None:
        for layer, pages in enumerate(self._pages):
            pages[blocks] = source.array[: len(blocks), layer]


class StreamPageWriter:
    """On a stream of its own, behind the steps that may still write to the blocks."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = pages
        self._device = pages[0].device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, source: StagingMemory, blocks: Sequence[int], mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(mark)
            where = torch.tensor(blocks, dtype=torch.int64, device=self._device)
            found = torch.empty((len(blocks), *source.shape), dtype=source.dtype, device=self._device)
            for at, slots in source.runs(np.arange(len(blocks))):
                found[at : at + len(slots)].copy_(slots, non_blocking=True)
            for layer, pages in enumerate(self._pages):
                pages.index_copy_(0, where, found[:, layer])
        stream.synchronize()


def make_page_writer(pages: Sequence[torch.Tensor]) -> PageWriter:
    return StreamPageWriter(pages) if pages[0].is_cuda else HostPageWriter(pages)
