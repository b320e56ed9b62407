"""Steps of a model that two processes share: replayed with their collectives, which are as many as theory says."""

import pytest

from quire.distributed.group import Count
from quire.distributed.layout import WorldLayout
from quire.distributed.world import SINGLE_WORLD
from quire.kernels.native.build import library
from tests.distributed.every_rank_plans import generate
from tests.distributed.ranks import free_address, in_world, on_ranks, over_gloo
from tests.tiny_models import prompts, save_tiny

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C kernels")

LAYERS, HIDDEN, VOCABULARY, BF16 = 4, 64, 211, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


def test_replayed_steps_of_two_ranks_give_the_same(model):
    lengths, layout = [8, 15, 22], WorldLayout(tensor=2)
    found = {
        name: on_ranks(2, how, generate, layout, free_address(), model, replay, lengths)
        for name, how, replay in (("replayed", in_world, True), ("plain", in_world, False), ("gloo", over_gloo, True))
    }
    for name, ranks in found.items():
        assert ranks[0] == ranks[1]
        assert (ranks[0][1] >= max(lengths)) == (name == "replayed"), ranks[0][1]
    assert found["replayed"][0][2] == found["plain"][0][2]
    assert found["replayed"][0][0] == found["plain"][0][0] == found["gloo"][0][0]


def test_one_rank_exchanges_nothing(model):
    assert generate(SINGLE_WORLD, model, True, [4])[2] == {}


def test_collectives_are_as_many_as_theory_says(model):
    """A sum for the embedding and two for each layer, over all tokens; a gather of logits, over the sampled rows."""
    steps = 9
    found = on_ranks(2, in_world, generate, WorldLayout(tensor=2), free_address(), model, True, [steps])
    tokens = len(prompts()[0]) + steps - 1
    sums, share = 1 + 2 * LAYERS, -(-VOCABULARY // 2)
    for rank in range(2):
        counts = found[rank][2]
        assert counts["all_reduce"] == Count(sums * steps, sums * tokens * HIDDEN * BF16)
        assert counts["all_gather"] == Count(steps, steps * share * BF16)
