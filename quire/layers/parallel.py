"""A worker's place in tensor parallelism."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorParallel:
    """This worker's place among those that share every layer."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total` equal pieces."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) cannot be divided among {self.size} tensor-parallel workers")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            raise NotImplementedError("tensor parallelism over several workers is not connected yet")
        return x


SINGLE = TensorParallel()
