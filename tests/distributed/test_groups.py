"""Collectives among real processes: against torch's sums, bit for bit the same on all ranks, and when ranks die."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire.distributed import shm_group
from quire.distributed.gpu_group import GPU_ALL_REDUCE, GpuGroup
from quire.distributed.group import Count, Group
from quire.distributed.layout import WorldLayout
from quire.distributed.shm_group import PIECE, SharedMemoryGroup
from quire.distributed.world import World
from quire.kernels.native.build import library
from tests.distributed.ranks import WAIT, die, free_address, in_world, on_ranks, over_gloo

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C kernels")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 8), (3, 1), (7, 33), (5,), (), (0, 4), (2, 3, 5), (1, 16387), (300, 1024), (1, PIECE + 3))
MANY = 10_000


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return (made * 10).to(dtype)


def all_collectives(world: World) -> dict[str, list[torch.Tensor]]:
    group, found = world.tensor, {"sum": [], "gather": [], "broadcast": []}
    for shape in SHAPES:
        for dtype in FLOATS:
            mine = tensor(world.rank, shape, dtype)
            kept = mine.clone()
            found["sum"].append(group.all_reduce(mine.clone()))
            if shape:
                found["gather"].append(group.all_gather(mine))
            assert torch.equal(mine, kept)
            found["broadcast"].append(group.broadcast(mine.clone(), source=world.size - 1))
    assert group.all_reduce(torch.tensor([1 << 40, world.rank])).tolist() == [
        world.size << 40,
        sum(range(world.size)),
    ]
    strided = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(group.all_reduce(strided.clone(memory_format=torch.preserve_format)), strided * world.size)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_give_every_rank_the_same_bits(size):
    results = on_ranks(size, in_world, all_collectives, WorldLayout(tensor=size), free_address())
    cases = [(shape, dtype) for shape in SHAPES for dtype in FLOATS]
    for rank in range(size):
        for name, tensors in results[rank].items():
            for ours, first in zip(tensors, results[0][name], strict=True):
                assert torch.equal(ours, first), (name, rank, ours.shape, ours.dtype)
    found = results[0]
    for (shape, dtype), summed, sent in zip(cases, found["sum"], found["broadcast"], strict=True):
        parts = [tensor(rank, shape, dtype) for rank in range(size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        assert torch.equal(summed, total.to(dtype))
        assert torch.equal(sent, parts[-1])
    for (shape, dtype), gathered in zip([case for case in cases if case[0]], found["gather"], strict=True):
        assert torch.equal(gathered, torch.cat([tensor(rank, shape, dtype) for rank in range(size)], dim=-1))


def sum_of_special_values(world: World) -> torch.Tensor:
    largest, smallest = torch.finfo(torch.float16).max, 2.0**-24
    values = [0.0, -0.0, largest, -largest, smallest, -smallest, 2.0**-14, 32.0, float("inf"), float("nan"), 2049.0]
    return world.tensor.all_reduce(torch.tensor(values, dtype=torch.float16))


def test_sums_of_special_halves():
    found = on_ranks(2, in_world, sum_of_special_values, WorldLayout(tensor=2), free_address())
    expected = [0.0, -0.0, "inf", "-inf", 2.0**-23, -(2.0**-23), 2.0**-13, 64.0, "inf", "nan", 4098.0]
    wanted = torch.tensor([float(value) for value in expected], dtype=torch.float16)
    for rank in range(2):
        assert torch.equal(found[rank].nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(found[rank].signbit(), wanted.signbit())


def many_small_sums(world: World) -> tuple[int, dict[str, Count], str]:
    x = torch.empty(1, 16)
    for i in range(MANY):
        x.fill_(i + world.rank)
        if not (world.tensor.all_reduce(x) == world.size * i + sum(range(world.size))).all():
            return i, {}, ""
    return MANY, world.tensor.counts, type(world.tensor).__name__


@pytest.mark.parametrize("size", [2, 4])
def test_many_in_a_row(size):
    """Four ranks are more than this machine may have cores."""
    found = on_ranks(size, in_world, many_small_sums, WorldLayout(tensor=size), free_address())
    counted = {"all_reduce": Count(MANY, MANY * 64)}
    assert found == dict.fromkeys(range(size), (MANY, counted, SharedMemoryGroup.__name__))


def all_groups(world: World) -> dict[str, object]:
    x = torch.full((2, 3), float(world.rank))
    stages = world.stages
    if world.stage == 0:
        stages.send(x, 1)
    else:
        x = stages.receive(x, 0)
    return {
        "tensor": world.tensor.all_gather(torch.tensor([[float(world.rank)]])).tolist()[0],
        "model": world.model.all_reduce(torch.ones(1)).item(),
        "passed": x[0, 0].item(),
        "answers": world.answers,
        "kinds": [type(group) for group in (world.tensor, world.stages, world.model)],
        "counts": stages.counts,
    }


def test_tensor_ranks_share_memory_and_stages_do_not():
    layout = WorldLayout(tensor=2, stages=2)
    found = on_ranks(4, in_world, all_groups, layout, free_address())
    for rank in range(4):
        assert found[rank]["tensor"] == ([0, 1] if rank < 2 else [2, 3])
        assert found[rank]["model"] == 4
        assert found[rank]["passed"] == rank % 2
        assert found[rank]["answers"] == (rank == 2)
        assert found[rank]["kinds"] == [SharedMemoryGroup, Group, Group]
        assert found[rank]["counts"] == {"send" if rank < 2 else "receive": Count(1, 24)}


def one_rank_of_each_stage(world: World) -> tuple[bool, bool, list[float]]:
    world.tensor.all_reduce(torch.ones(2))
    gathered = world.stages.all_gather(torch.full((1,), float(world.rank)))
    return world.tensor.alone, world.tensor.counts == {}, gathered.tolist()


def test_a_group_of_one_rank_exchanges_nothing():
    found = on_ranks(2, in_world, one_rank_of_each_stage, WorldLayout(stages=2), free_address())
    assert found == dict.fromkeys(range(2), (True, True, [0.0, 1.0]))


class SumOfFew:
    """An all-reduce of a plugin's, for tensors of up to 16 elements."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group, self.calls = process_group, 0

    def supports(self, x: torch.Tensor) -> bool:
        return x.numel() <= 16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        parts = [torch.empty_like(x) for _ in range(self.process_group.size())]
        dist.all_gather(parts, x, group=self.process_group)
        return torch.stack(parts).sum(0)


def registered_all_reduce(world: World) -> dict[str, object]:
    GPU_ALL_REDUCE.insert(0, SumOfFew)
    group = GpuGroup(world.model.ranks, world.rank, world.model._group)
    few, many = torch.full((2, 4), float(world.rank)), torch.full((9, 9), float(world.rank))
    x = torch.arange(6).view(2, 3) + 10 * world.rank
    return {
        "sums": [group.all_reduce(few)[0, 0].item(), group.all_reduce(many)[0, 0].item()],
        "registered": group._all_reduces[0].calls,
        "gathered": group.all_gather(x).tolist(),
        "broadcast": group.broadcast(x.t(), source=1).tolist(),
        "counts": group.counts,
    }


def test_a_registered_all_reduce_serves_what_it_supports():
    """What GPUs use, here over gloo."""
    found = on_ranks(3, over_gloo, registered_all_reduce, WorldLayout(tensor=3), free_address())
    for result in found.values():
        assert result["sums"] == [3, 3] and result["registered"] == 1
        assert result["gathered"] == [[0, 1, 2, 10, 11, 12, 20, 21, 22], [3, 4, 5, 13, 14, 15, 23, 24, 25]]
        assert result["broadcast"] == [[10, 13], [11, 14], [12, 15]]
        assert result["counts"] == {"all_reduce": (2, 32 + 324), "all_gather": (1, 48), "broadcast": (1, 48)}


def ordered_sums(world: World) -> list[torch.Tensor]:
    found = []
    for group in (world.model, GpuGroup(world.model.ranks, world.rank, world.model._group)):
        group.sum_in_order()
        found += [group.all_reduce(tensor(world.rank, shape, dtype)) for shape in SHAPES for dtype in FLOATS]
    return found


def test_sums_in_the_order_of_ranks():
    """So an element's bits do not depend on how many there are."""
    results = on_ranks(4, over_gloo, ordered_sums, WorldLayout(tensor=4), free_address())
    wanted = []
    for shape in SHAPES:
        for dtype in FLOATS:
            first, *others = (tensor(rank, shape, dtype).float() for rank in range(4))
            for each in others:
                first = first + each
            wanted.append(first.to(dtype))
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(results[rank], wanted * 2, strict=True)), rank


def one_dies(world: World, victim: int) -> None:
    for i in range(20):
        if world.rank == victim and i == 7:
            die()
        world.tensor.all_reduce(torch.ones(4))


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 2)])
def test_a_killed_rank_is_named(size, victim):
    found = on_ranks(size, in_world, one_dies, WorldLayout(tensor=size), free_address(), victim)
    assert found.pop(victim) is None
    for text in found.values():
        assert f"rank {victim} (process " in text and "has ended" in text


def test_a_killed_rank_is_named_over_gloo():
    found = on_ranks(2, over_gloo, one_dies, WorldLayout(tensor=2), free_address(), 1)
    assert found[1] is None
    assert "all_reduce among ranks [0, 1] failed: rank 1 (process " in found[0]


def one_fails(world: World) -> None:
    world.tensor.all_reduce(torch.ones(4))
    if world.rank == 1:
        world.fail()
        raise KeyError("a cause of its own")
    world.tensor.all_reduce(torch.ones(4))


def test_a_rank_that_fails_ends_the_waits_of_others():
    found = on_ranks(3, in_world, one_fails, WorldLayout(tensor=3), free_address())
    assert found[1] == "KeyError: 'a cause of its own'"
    for rank in (0, 2):
        assert "RuntimeError: rank 1 (process " in found[rank] and "has failed" in found[rank]


def one_is_late(rank: int, address: str, notes: str) -> None:
    world = World.connect(rank, WorldLayout(tensor=2), address, "gloo", 2.0)
    store = dist.FileStore(notes, 2)
    if rank == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=60))
    try:
        world.tensor.all_reduce(torch.ones(4))
    finally:
        store.set(f"rank {rank} gave up", "")


def test_a_rank_that_does_something_else_is_late(tmp_path):
    found = on_ranks(2, one_is_late, free_address(), str(tmp_path / "notes"))
    for text in found.values():
        assert "rank 1 (process " in text and "did not take part in a collective within 2 seconds" in text


def use_after_close(world: World) -> None:
    world.tensor.all_reduce(torch.ones(4))
    world.close()
    world.tensor.all_reduce(torch.ones(4))


def test_a_closed_group_says_so():
    found = on_ranks(2, in_world, use_after_close, WorldLayout(tensor=2), free_address())
    assert set(found.values()) == {"RuntimeError: the group of ranks is closed"}


def what_is_open(rank: int, address: str) -> list[int]:
    """Maps and files of the shared memory: before, while and after a world is connected."""

    def count() -> int:
        maps = Path("/proc/self/maps").read_text().count("quire-ranks")
        return maps + sum(
            "quire-ranks" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        )

    found = [count()]
    world = World.connect(rank, WorldLayout(tensor=2), address, "gloo", WAIT)
    found.append(count())
    world.close()
    return [*found, count()]


def test_a_closed_world_leaves_nothing_open():
    assert on_ranks(2, what_is_open, free_address()) == {0: [0, 2, 0], 1: [0, 2, 0]}


def without_kernels(rank: int, address: str, which: int) -> tuple[type, float]:
    if rank == which:
        shm_group.library = lambda: None
    world = World.connect(rank, WorldLayout(tensor=2), address, "gloo", WAIT)
    try:
        return type(world.tensor), world.tensor.all_reduce(torch.ones(1)).item()
    finally:
        world.close()


@pytest.mark.parametrize("which", [0, 1])
def test_all_use_gloo_if_one_rank_cannot_share_memory(which):
    assert on_ranks(2, without_kernels, free_address(), which) == {0: (Group, 2.0), 1: (Group, 2.0)}
