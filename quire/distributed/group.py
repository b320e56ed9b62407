"""Ranks that exchange tensors. Every collective of Quire goes through here."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

MAX_SENT = 64  # tensors on the way


class Count(NamedTuple):
    """Of a collective: how often it was called, and the bytes of this rank's tensors in all."""

    calls: int
    bytes: int


def nobody(ranks: Sequence[int]) -> list[str]:
    return []


class Group:
    """Some ranks of a world, by torch's process groups. Of one rank without one: nothing is exchanged. What is on a GPU
    goes through the host here, so this serves ranks that share one."""

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        process_group: "dist.ProcessGroup | None" = None,
        find_gone: Callable[[Sequence[int]], list[str]] = nobody,
    ) -> None:
        """`rank` is this process's in the world; `find_gone` names those whose process has ended."""
        self.ranks, self.rank, self.size = tuple(ranks), tuple(ranks).index(rank), len(ranks)
        self._group, self._find_gone = process_group, find_gone
        self.alone = self.size == 1 and process_group is None  # collectives return what they are given
        self.capturable = self.alone  # whether a CUDA graph can contain its collectives
        self._in_order = False
        self._counts: dict[str, Count] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()  # which must live until they are received

    @property
    def counts(self) -> dict[str, Count]:
        """By collective. What a CUDA graph replays is not counted."""
        return dict(self._counts)

    def like(self, process_group: "dist.ProcessGroup") -> "Group":
        """The same ranks, by another of torch's process groups."""
        return Group(self.ranks, self.ranks[self.rank], process_group, self._find_gone)

    def sum_in_order(self) -> None:
        """From now on numbers are added in the ranks' order, on every rank: libraries add in one that depends on how
        many there are. More is exchanged."""
        self._in_order = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place where that is possible."""
        if self.alone:
            return x
        if self._in_order:
            return self._ordered_sum(x)
        with self._exchange("all_reduce", x):
            host = x.cpu().contiguous()
            dist.all_reduce(host, group=self._group)
            return x if host is x else x.copy_(host)

    def _ordered_sum(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.all_gather(x.flatten()).view(self.size, *x.shape)
        total = first.float() if x.dtype in (torch.bfloat16, torch.float16) else first
        for each in others:
            total = total + each
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, of one shape, concatenated along the last dimension."""
        if self.alone:
            return x
        with self._exchange("all_gather", x):
            host = x.cpu().contiguous()
            found = [torch.empty_like(host) for _ in range(self.size)]
            dist.all_gather(found, host, group=self._group)
            return torch.cat(found, dim=-1).to(x.device)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Into x, from the rank that is `source` in this group."""
        if self.alone:
            return x
        with self._exchange("broadcast", x):
            host = x.cpu().contiguous()
            dist.broadcast(host, self.ranks[source], group=self._group)
            return x if host is x else x.copy_(host)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Does not wait for the receiver: x must not be changed any more."""
        with self._exchange("send", x):
            self._send(x.cpu().contiguous(), to)

    def _send(self, x: torch.Tensor, to: int) -> None:
        work = dist.isend(x, self.ranks[to], group=self._group)
        if work is not None:
            self._sent.append((work, x))
        if len(self._sent) > MAX_SENT:
            self._sent.popleft()[0].wait()  # gloo's sends are only known to be done by that; it was received long ago

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        with self._exchange("receive", x):
            host = torch.empty_like(x, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(host, self.ranks[source], group=self._group)
            return x.copy_(host)

    def fail(self) -> None:
        """This rank takes part in nothing more: ends the others' waits where the group can tell them."""

    def close(self) -> None:
        """Give back what the group holds."""

    def _count(self, collective: str, x: torch.Tensor) -> None:
        calls, total = self._counts.get(collective, (0, 0))
        self._counts[collective] = Count(calls + 1, total + x.nbytes)

    @contextmanager
    def _exchange(self, collective: str, x: torch.Tensor) -> Iterator[None]:
        self._count(collective, x)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
            gone = self._find_gone(others)
            cause = f"{', '.join(gone)} has ended" if gone else str(error)
            raise RuntimeError(f"{collective} among ranks {list(self.ranks)} failed: {cause}") from error


ALONE = Group()
