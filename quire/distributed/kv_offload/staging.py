"""Host memory that blocks pass through on their way between the device and a store."""

import mmap

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
        self._thread = None
        if pages[0].is_cuda:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))

    def buffer(self, slot: int) -> Buffer:
        return self.memory[slot * self.stride : (slot + 1) * self.stride]
