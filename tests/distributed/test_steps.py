"""Steps of a model that two processes share: replayed with their collectives, which are as many as theory says."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.group import Count
from quire.distributed.layout import WorldLayout
from quire.distributed.world import SINGLE_WORLD, World
from quire.executor.uniproc import UniProcExecutor
from quire.kernels.native.build import library
from quire.worker import recorded
from quire.worker.worker import Worker
from tests.distributed.ranks import free_address, in_world, on_ranks, over_gloo
from tests.tiny_models import prompts, save_tiny

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C kernels")

LAYERS, HIDDEN, VOCABULARY, BF16 = 4, 64, 211, 2
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 22, "max_model_len": 176, "cpu_threads": 1, "cpu_pin": False,
    "skip_tokenizer_init": True, "async_scheduling": False,
}  # fmt: skip


class EveryRankPlans(UniProcExecutor):
    """Each process has an engine of its own that plans the same steps, as under an external launcher."""

    world = SINGLE_WORLD

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, lambda config: Worker(config, self.world))


def generate(world: World, model: str, replay: bool, lengths: list[int]) -> tuple[list[list[int]], int, dict]:
    """Token ids, replayed steps, and the collectives of all steps."""
    EveryRankPlans.world = world
    if not replay:
        recorded.MAX_TOKENS = 0
    with LLM(model, distributed_executor_backend=f"{__name__}:EveryRankPlans", **SETTINGS) as llm:
        before = world.tensor.counts
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(prompts()[: len(lengths)], params, use_tqdm=False)
        counts = {
            name: Count(*(now - then for now, then in zip(count, before.get(name, (0, 0)), strict=True)))
            for name, count in world.tensor.counts.items()
        }
        replays = llm.llm_engine.client.core.executor.worker.runner.recorded.replays
        return [list(one.outputs[0].token_ids) for one in outputs], replays, counts


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
