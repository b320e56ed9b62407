"""Host memory that blocks pass through on their way between the device and a store."""

import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from quire.distributed.kv_offload.block_file import SECTOR
from quire.distributed.kv_offload.block_store import Buffer
from quire.distributed.kv_offload.host_memory import HostMemory


class StagingMemory(HostMemory):
    """Slots begin at a page of memory and fill whole ones, as O_DIRECT wants it. On a GPU it is pinned."""

    def __init__(self, pages: list[torch.Tensor], num_slots: int) -> None:
        self.shape = (len(pages), *pages[0].shape[1:])
        self.dtype = pages[0].dtype
        self.slot_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.stride = -(-self.slot_bytes // SECTOR) * SECTOR
        self.num_slots = self.slots_per_part = num_slots
        self.memory: Buffer = memoryview(mmap.mmap(-1, num_slots * self.stride))  # costs nothing until used
        whole = torch.frombuffer(self.memory, dtype=torch.uint8).view(num_slots, self.stride)
        self.parts = [whole[:, : self.slot_bytes].view(self.dtype).unflatten(1, self.shape)]
        self.array: np.ndarray = self.parts[0].numpy()  # the same
        self._thread = self._end = None
        if pages[0].is_cuda:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))
            self._end = weakref.finalize(self, _unpin, whole)

    def runs(self, slots: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """Slot by slot where there are gaps: torch copies rows with gaps through memory that is not pinned."""
        if self.stride == self.slot_bytes:
            yield from super().runs(slots)
        else:
            yield from ((i, self.parts[0][slot : slot + 1]) for i, slot in enumerate(slots.tolist()))

    def buffer(self, slot: int) -> Buffer:
        return self.memory[slot * self.stride : (slot + 1) * self.stride]


def _unpin(memory: torch.Tensor) -> None:
    """While it is still mapped: pages that stay pinned are never given back."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
