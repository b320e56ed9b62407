"""Ranks on a GPU: NCCL's collectives in captured graphs, and two processes that share one GPU."""

import pytest
import torch

from quire.distributed.gpu_group import GpuGroup
from quire.distributed.layout import WorldLayout
from quire.distributed.world import SINGLE_WORLD, World
from tests.distributed.every_rank_plans import generate
from tests.distributed.ranks import free_address, on_ranks
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [8, 15, 22]
GPU = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


def alone(rank: int, model: str) -> list[list[int]]:
    return generate(SINGLE_WORLD, model, True, LENGTHS, **GPU)[0]


def captured(rank: int, address: str) -> list[float]:
    world = World.connect(rank, WorldLayout(), address, "nccl", 60, even_alone=True)
    group = world.tensor
    assert isinstance(group, GpuGroup) and group.capturable
    x, graph = torch.zeros(4, 8, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = group.all_gather(group.broadcast(group.all_reduce(x * 2)))
    results = []
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        results.append(found.unique().item())
    world.close()
    return results


def test_a_graph_contains_nccl_collectives():
    assert on_ranks(1, captured, free_address())[0] == [6.0, 10.0]


def alone_with_nccl(rank: int, model: str, address: str) -> tuple[list[list[int]], int, int]:
    world = World.connect(rank, WorldLayout(), address, "nccl", 60, even_alone=True)
    tokens, graphs, _ = generate(world, model, True, LENGTHS, **GPU)
    return tokens, graphs, world.tensor.counts["all_reduce"].calls


def test_one_rank_with_nccl_says_what_one_without_says(model):
    tokens, graphs, sums = on_ranks(1, alone_with_nccl, model, free_address())[0]
    assert tokens == on_ranks(1, alone, model)[0]
    assert graphs > 0 and sums > 0


def two_on_one_gpu(rank: int, model: str, address: str) -> tuple[list[list[int]], int, dict]:
    world = World.connect(rank, WorldLayout(tensor=2), address, "gloo", 60, local_rank=0)
    try:
        return generate(world, model, True, LENGTHS, **GPU)
    finally:
        world.close()


def test_two_ranks_that_share_a_gpu_say_what_one_says(model):
    found = on_ranks(2, two_on_one_gpu, model, free_address())
    assert found[0] == found[1]
    tokens, graphs, counts = found[0]
    assert tokens == on_ranks(1, alone, model)[0]
    assert graphs == 0 and counts["all_reduce"].calls > 0
