"""This process's place among all workers, and the groups that it exchanges tensors in."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from quire.distributed.group import ALONE, Group
from quire.distributed.layout import WorldLayout

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
        cls, rank: int, layout: WorldLayout, address: str, backend: str, timeout: float, local_rank: int | None = None
    ) -> "World":
        """Meet all other ranks at `address`, as torch.distributed has them ("tcp://host:port", "file:///path"),
        within so many seconds."""
        if layout.size == 1:
            return cls()
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=layout.size, timeout=limit)
        found = {}
        for kind in ("tensor", "stage", "model", "token"):
            shared = "stage" if kind == "token" else kind
            members = [getattr(layout, f"{shared}_ranks")(each) for each in range(layout.size)]
            for ranks in dict.fromkeys(members):  # every rank takes part in making every group
                group = dist.new_group(list(ranks), timeout=limit)
                if rank in ranks:
                    found[kind] = Group(ranks, rank, group)
        local = rank if local_rank is None else local_rank
        return cls(rank, layout, local, found["tensor"], found["stage"], found["model"], found["token"])

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


SINGLE_WORLD = World()
