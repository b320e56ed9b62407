"""A worker's rank in tensor parallelism."""

from dataclasses import dataclass

import torch

from quire.distributed.group import ALONE, Group

MAX_SIZE = 64  # that errors list


@dataclass(frozen=True)
class TensorParallel:
    """This worker's rank among those that share every layer."""

    rank: int = 0
    size: int = 1
    group: Group = ALONE

    def share(self, total: int, what: str) -> int:
        """This rank's share of `total`, which must divide evenly."""
        if total % self.size:
            sizes = ", ".join(str(size) for size in range(1, min(total, MAX_SIZE) + 1) if total % size == 0)
            raise ValueError(
                f"{what} ({total}) cannot be divided among {self.size} tensor-parallel workers; it allows {sizes} "
                "(--tensor-parallel-size)"
            )
        return total // self.size

    def share_of_kv_heads(self, total: int) -> tuple[int, int]:
        """This rank's first of the KV heads and their number. With fewer heads than ranks several have the same one."""
        if total >= self.size:
            share = self.share(total, "KV heads")
            return share * self.rank, share
        if self.size % total:
            raise ValueError(
                f"KV heads ({total}) cannot be repeated on {self.size} tensor-parallel workers; a multiple of {total} "
                "is allowed, or a number that divides it (--tensor-parallel-size)"
            )
        return self.rank * total // self.size, 1

    def share_of_rows(self, total: int, what: str) -> tuple[int, int]:
        """This rank's first of `total` rows and their number, which may be smaller on the last rank."""
        share = -(-total // self.size)
        if share * (self.size - 1) >= total:
            raise ValueError(f"{what} ({total}) cannot be divided among {self.size} tensor-parallel workers")
        first = share * self.rank
        return first, min(share, total - first)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return x if self.size == 1 and self.group.alone else self._connected().all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, of one shape, concatenated along the last dimension."""
        return x if self.size == 1 and self.group.alone else self._connected().all_gather(x)

    def _connected(self) -> Group:
        if self.group.size != self.size:
            raise RuntimeError(f"this is one of {self.size} tensor-parallel ranks that are not connected")
        return self.group


SINGLE = TensorParallel()
