"""Ranks with a GPU each: NCCL, whose collectives CUDA graphs can contain, and a registry of faster all-reduces."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from quire.distributed.group import Group, nobody

# Under its name of today, else under that of torch before 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllReduce(Protocol):
    """A way to sum over the ranks of one group. Every rank must choose the same: by shape and type alone."""

    def supports(self, x: torch.Tensor) -> bool: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place or not, on the current stream, without waiting for the host."""
        ...


class NcclAllReduce:
    """Any size and type."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group

    def supports(self, x: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.process_group)
        return x


# Made for each group, on every rank; the first that supports a tensor sums it.
GPU_ALL_REDUCE: list[Callable[[dist.ProcessGroup], AllReduce]] = [NcclAllReduce]


class GpuGroup(Group):
    """Nothing goes through the host."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup,
        find_gone: Callable[[Sequence[int]], list[str]] = nobody,
    ) -> None:
        super().__init__(ranks, rank, process_group, find_gone)
        self.capturable = True
        self._all_reduces = [make(process_group) for make in GPU_ALL_REDUCE]

    def warm_up(self, device: torch.device) -> None:
        """Connect now: a graph that is being captured cannot."""
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def warm_up_pairs(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """The same for those that send, and receive, in this order."""
        one = torch.zeros(1, device=device)
        for sender, receiver in pairs:
            if self.rank == sender:
                dist.send(one, self.ranks[receiver], group=self._group)
            elif self.rank == receiver:
                dist.recv(one, self.ranks[sender], group=self._group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._in_order:
            return self._ordered_sum(x)
        with self._exchange("all_reduce", x):
            return next(way for way in self._all_reduces if way.supports(x))(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        with self._exchange("all_gather", x):
            found = x.new_empty(self.size, *x.shape)
            _all_gather(found.flatten(), x.flatten(), group=self._group)
            return found.movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        with self._exchange("broadcast", x):
            same = x.contiguous()
            dist.broadcast(same, self.ranks[source], group=self._group)
            return x if same is x else x.copy_(same)

    def send(self, x: torch.Tensor, to: int) -> None:
        with self._exchange("send", x):
            dist.send(x.contiguous(), self.ranks[to], group=self._group)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        with self._exchange("receive", x):
            same = x.contiguous()
            dist.recv(same, self.ranks[source], group=self._group)
            return x if same is x else x.copy_(same)
