"""A worker's rank in tensor parallelism."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorParallel:
    """This worker's rank among those that share every layer."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) cannot be divided among {self.size} tensor-parallel workers")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            raise NotImplementedError("tensor parallelism over several workers is not supported yet")
        return x


SINGLE = TensorParallel()
