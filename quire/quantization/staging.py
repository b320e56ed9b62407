"""Staging buffer for a layer's unquantized weight while its partitions are loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition


class Staging:
    """Allocated with the first partition, passed to `finish` and freed after the last.

    A checkpoint stores a layer's tensors together, so few layers are staged at a time.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: int,
        finish: Callable[[torch.Tensor], None],
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._missing = parts
        self._finish = finish
        self._weight: torch.Tensor | None = None
        self._lock = Lock()

    def part(self, offset: int, size: int) -> torch.Tensor:
        with self._lock:
            if self._weight is None:
                self._weight = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            return self._weight.narrow(0, offset, size)

    def done(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing or self._weight is None:
                return
            whole, self._weight = self._weight, None
        self._finish(whole)

    def slots(self, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        outline = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return {
            ("weight", p.shard): StagedSlot(
                outline.narrow(0, p.offset, p.size), p.full_shape, p.dim, p.start, staging=self, offset=p.offset
            )
            for p in partitions
        }


@dataclass(frozen=True)
class StagedSlot(LoadSlot):
    staging: Staging | None = None
    offset: int = 0

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        assert self.staging is not None
        yield self.staging.part(self.offset, self.view.shape[0])
        self.staging.done()
