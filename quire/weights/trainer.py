"""A trainer's side: weights into shared memory, or broadcast to the workers of an engine."""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quire.weights.sources import DESCRIPTOR, STORED_NAMES, from_state_dict, gathered
from quire.weights.transfer import MEETING_SECONDS, SENDER, broadcast, connect

ALIGNMENT = 64


class WeightSender:
    """Broadcasts weights to engines that were given `init_info`. The engine's calls wait for this side and this side
    for them: make them in another thread, or in another process.

    sender = WeightSender("127.0.0.1", 29600, workers=1, backend="gloo")
    thread = Thread(target=llm.init_weight_transfer_engine, args=({"init_info": sender.init_info},)); thread.start()
    sender.connect()
    """

    def __init__(self, address: str, port: int, workers: int, backend: str = "nccl", device: str | None = None) -> None:
        self._backend, self._workers = backend, workers
        self._place = (address, port)
        self._device = torch.device(device or ("cuda" if backend == "nccl" else "cpu"))
        self._group: Any = None

    @property
    def init_info(self) -> dict[str, Any]:
        address, port = self._place
        return {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 1 + self._workers}

    def connect(self, seconds: float = MEETING_SECONDS) -> None:
        """Until all workers are there."""
        self._group = connect(self._backend, *self._place, SENDER, 1 + self._workers, self._device, seconds)

    @staticmethod
    def update_info(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What `update_weights` is told before `send`."""
        return {
            "names": list(state),
            "dtype_names": [str(value.dtype).removeprefix("torch.") for value in state.values()],
            "shapes": [list(value.shape) for value in state.values()],
        }

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        for tensor in state.values():
            broadcast(self._group, gathered(tensor.detach()).to(self._device).contiguous())


@contextmanager
def in_shared_memory(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The `update_info` of weights for processes of this machine, as safetensors in memory without a name: it is gone
    with this context, or with this process."""
    given = {tensor.name: tensor.tensor() for tensor in from_state_dict(state)}
    places, at = {}, 0
    for name, tensor in given.items():
        places[name] = (at, at + tensor.nbytes)
        at += tensor.nbytes
    described = {
        name: {"dtype": STORED_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places[name]}
        for name, tensor in given.items()
    }
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    number = os.memfd_create("quire-weights")
    try:
        os.truncate(number, max(start + at, 1))
        with mmap.mmap(number, start + at) as memory:
            memory[:start] = len(text).to_bytes(8, "little") + text
            for name, tensor in given.items():
                first, last = (start + offset for offset in places[name])
                if tensor.nbytes:
                    whole = torch.frombuffer(memory, dtype=torch.uint8, count=last - first, offset=first)
                    whole.copy_(tensor.contiguous().view(-1).view(torch.uint8))
                    del whole  # the mapping cannot be closed before
        yield {DESCRIPTOR: [os.getpid(), number]}
    finally:
        os.close(number)
