"""This process's place among all workers, and the groups that it exchanges tensors in."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from quire.distributed.gpu_group import GpuGroup
from quire.distributed.group import ALONE, Group
from quire.distributed.layout import WorldLayout
from quire.distributed.rendezvous import Meeting, meet
from quire.distributed.shm_group import SharedMemoryGroup

ONE_RANK = WorldLayout()


@dataclass(frozen=True)
class World:
    rank: int = 0
    layout: WorldLayout = ONE_RANK
    local_rank: int = 0  # on this machine: the number of its device
    tensor: Group = ALONE
    stages: Group = ALONE
    model: Group = ALONE  # all ranks that run the same plans
    tokens: Group = ALONE  # as `stages`, for what goes the other way: neither waits for the other
    owns_torch: bool = True  # False where the program has made torch's default process group itself

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def stage(self) -> int:
        return self.layout.place(self.rank).stage

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.stages - 1

    @property
    def answers(self) -> bool:
        """Whether it samples, and sends results: the first rank of the last stage."""
        return self.is_last_stage and self.layout.place(self.rank).tensor == 0

    @classmethod
    def connect(
        cls,
        rank: int,
        layout: WorldLayout,
        address: str,
        backend: str,
        timeout: float,
        local_rank: int | None = None,
        share_memory: bool = True,
        even_alone: bool = False,
    ) -> "World":
        """Meet all other ranks at `address` ("tcp://host:port", "file:///path") within so many seconds, which is also
        the limit of every wait after that. `backend`: "nccl" where each rank has a GPU of its own, else "gloo", with
        which ranks of one machine that share layers exchange tensors over shared memory if `share_memory`.
        `even_alone`: groups of one rank make process groups
        too."""
        if not 0 <= rank < layout.size:
            raise ValueError(f"rank {rank} is not in a world of {layout.size}; allowed: 0 to {layout.size - 1}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"ranks cannot exchange tensors by {backend!r}; allowed: gloo, nccl")
        if layout.size == 1 and not even_alone:
            return cls()
        local, limit = rank if local_rank is None else local_rank, timedelta(seconds=timeout)
        if backend == "nccl":
            torch.cuda.set_device(local)
        meeting = meet(rank, layout, address, backend, timeout)
        store = dist.PrefixStore("torch", meeting.store)
        owns_torch = not dist.is_initialized()
        try:
            if owns_torch:
                dist.init_process_group(backend, store=store, rank=rank, world_size=layout.size, timeout=limit)
            found = {
                kind: _make_group(kind, rank, layout, backend, timeout, meeting, share_memory, even_alone)
                for kind in ("tensor", "stage", "model", "token")
            }
        except RuntimeError as error:
            gone = meeting.find_gone(range(layout.size))
            cause = f"{', '.join(gone)} has ended" if gone else str(error)
            raise RuntimeError(f"{layout.size} ranks could not be connected by {backend}: {cause}") from error
        return cls(rank, layout, local, found["tensor"], found["stage"], found["model"], found["token"], owns_torch)

    def host_group(self, timeout: float) -> Group:
        """A further group of all ranks, for small tensors on the host. Every rank calls this at the same time."""
        if self.model.size == 1:
            return ALONE
        limit = timedelta(seconds=timeout)
        return self.model.like(dist.new_group(list(self.model.ranks), timeout=limit, backend="gloo"))

    def fail(self) -> None:
        """This rank takes part in nothing more: ends the waits of others that can be told."""
        for group in (self.tensor, self.stages, self.model, self.tokens):
            group.fail()

    def close(self) -> None:
        groups = (self.tensor, self.stages, self.model, self.tokens)
        for group in groups:
            group.close()
        if not all(group.alone for group in groups) and self.owns_torch and dist.is_initialized():
            dist.destroy_process_group()


def _make_group(
    kind: str,
    rank: int,
    layout: WorldLayout,
    backend: str,
    timeout: float,
    meeting: Meeting,
    share_memory: bool,
    even_alone: bool,
) -> Group:
    """This rank's of a kind. Every rank takes part in making all of them."""
    ranks_of = {"tensor": layout.tensor_ranks, "model": layout.model_ranks}.get(kind, layout.stage_ranks)
    members = [ranks_of(each) for each in range(layout.size)]
    if len(members[rank]) == 1 and not even_alone:
        return Group((rank,), rank)
    mine: tuple[tuple[int, ...], dist.ProcessGroup] | None = None
    for ranks in dict.fromkeys(members):
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend=backend)
        if rank in ranks:
            mine = ranks, group
    assert mine is not None
    ranks, group = mine
    if backend == "nccl":
        gpus = GpuGroup(ranks, rank, group, meeting.find_gone)
        device, last = torch.device("cuda", torch.cuda.current_device()), len(ranks) - 1
        gpus.warm_up(device)
        if kind == "stage":
            gpus.warm_up_pairs([(i, i + 1) for i in range(last)], device)
        elif kind == "token":
            gpus.warm_up_pairs([(last, i) for i in range(last)], device)
        return gpus
    one_machine = len({meeting.introductions[each]["machine"] for each in ranks}) == 1
    if kind == "tensor" and share_memory and one_machine and len(ranks) > 1:
        shared = SharedMemoryGroup.connect(ranks, rank, group, meeting.store, timeout, meeting.find_gone)
        if shared is not None:
            return shared
    return Group(ranks, rank, group, meeting.find_gone)


SINGLE_WORLD = World()
