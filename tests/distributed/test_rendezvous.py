"""Ranks that do not come, or are not alike: every rank that came is told which, within the limit."""

import socket

import pytest
import torch

from quire.distributed import rendezvous
from quire.distributed.layout import WorldLayout
from quire.distributed.rendezvous import meet
from quire.distributed.world import SINGLE_WORLD, World
from tests.distributed.ranks import free_address, on_ranks

LIMIT = 3.0
THREE = WorldLayout(tensor=3)


def connect(rank: int, layouts: dict[int, WorldLayout], address: str, versions: dict[int, str]) -> list[int]:
    version = versions.get(rank)
    if version is not None:
        rendezvous.version = lambda: version
    meeting = meet(rank, layouts.get(rank, THREE), address, "gloo", LIMIT)
    return [one["pid"] for one in meeting.introductions]


def test_ranks_know_each_other():
    found = on_ranks(3, connect, {}, free_address(), {})
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


def test_ranks_that_never_join_are_named():
    found = on_ranks(3, connect, {}, free_address(), {}, who=[0, 2])
    assert set(found.values()) == {"RuntimeError: rank 1 of 3 did not join within the time limit"}
    found = on_ranks(3, connect, {}, free_address(), {}, who=[0])
    assert found[0] == "RuntimeError: ranks 1, 2 of 3 did not join within the time limit"


def test_a_first_rank_that_never_joins_is_named():
    found = on_ranks(3, connect, {}, free_address(), {}, who=[1])
    assert "rank 0 did not open tcp://127.0.0.1" in found[1] and "within 3 seconds" in found[1]


def test_different_versions_are_an_error_on_all_ranks():
    found = on_ranks(3, connect, {}, free_address(), {0: "1.0", 1: "1.0", 2: "1.1"})
    assert set(found.values()) == {"RuntimeError: rank 0 has version 1.0, rank 2 has 1.1; all must be the same"}


def test_different_layouts_are_an_error_on_all_ranks():
    found = on_ranks(3, connect, {1: WorldLayout(stages=3)}, free_address(), {})
    assert len(set(found.values())) == 1
    assert "rank 0 has layout tensor 3 x stages 1 x data 1, rank 1 has tensor 1 x stages 3 x data 1" in found[2]


def test_a_port_in_use_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use"):
            World.connect(0, THREE, f"tcp://127.0.0.1:{port}", "gloo", LIMIT)


@pytest.mark.parametrize("address", ["127.0.0.1:1234", "tcp://127.0.0.1", "udp://127.0.0.1:12", "file://"])
def test_an_address_of_another_form_is_explained(address):
    with pytest.raises(ValueError, match="allowed: tcp://HOST:PORT, file:///PATH"):
        World.connect(0, THREE, address, "gloo", LIMIT)


def test_bad_arguments_are_explained():
    with pytest.raises(ValueError, match="rank 3 is not in a world of 3; allowed: 0 to 2"):
        World.connect(3, THREE, free_address(), "gloo", LIMIT)
    with pytest.raises(ValueError, match="by 'mpi'; allowed: gloo, nccl"):
        World.connect(0, THREE, free_address(), "mpi", LIMIT)


def alone(rank: int, address: str) -> tuple[float, dict]:
    world = World.connect(rank, WorldLayout(), address, "gloo", LIMIT, even_alone=True)
    try:
        return world.tensor.all_reduce(torch.full((1,), 3.0)).item(), world.tensor.counts
    finally:
        world.close()


def test_one_rank_needs_no_group_but_can_have_one(tmp_path):
    assert World.connect(0, WorldLayout(), "nowhere", "gloo", LIMIT) == SINGLE_WORLD
    assert on_ranks(1, alone, f"file://{tmp_path}/store")[0] == (3.0, {"all_reduce": (1, 4)})
