"""Ranks that exchange tensors. Every collective of Quire goes through here."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Group:
    """Some ranks of a world, by torch's process groups. Of one rank alone: nothing is exchanged."""

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0, process_group: "dist.ProcessGroup | None" = None):
        """`rank` is this process's in the world."""
        self.ranks, self.rank, self.size = tuple(ranks), tuple(ranks).index(rank), len(ranks)
        self._group = process_group
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # until they are received

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place where that is possible."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, of one shape, concatenated along the last dimension."""
        if self.size == 1:
            return x
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self._group)
        return torch.cat(found, dim=-1)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Into x, from the rank that is `source` in this group."""
        if self.size > 1:
            dist.broadcast(x, self.ranks[source], group=self._group)
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Does not wait for the receiver: x must not be changed any more."""
        x = x.cpu() if self._by_host(x) else x.contiguous()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(x, self.ranks[to], group=self._group)
        if work is not None:
            self._sent.append((work, x))

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Into x, which is contiguous."""
        if not self._by_host(x):
            dist.recv(x, self.ranks[source], group=self._group)
            return x
        found = torch.empty(x.shape, dtype=x.dtype)
        dist.recv(found, self.ranks[source], group=self._group)
        return x.copy_(found)

    def _by_host(self, x: torch.Tensor) -> bool:
        """gloo sends from a processor's memory only."""
        return x.is_cuda and dist.get_backend(self._group) == "gloo"


ALONE = Group()
