"""Engines in several processes that share a model; each plans the same steps, as under an external launcher."""

from typing import Any

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.group import Count
from quire.distributed.world import SINGLE_WORLD, World
from quire.executor.uniproc import UniProcExecutor
from quire.worker import recorded
from quire.worker.worker import Worker
from tests.tiny_models import prompts

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 22, "max_model_len": 176, "cpu_threads": 1, "cpu_pin": False,
    "skip_tokenizer_init": True, "async_scheduling": False,
}  # fmt: skip


class EveryRankPlans(UniProcExecutor):
    world = SINGLE_WORLD

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, lambda config: Worker(config, self.world))


def generate(
    world: World, model: str, replay: bool, lengths: list[int], **settings: Any
) -> tuple[list[list[int]], int, dict[str, Count]]:
    """Token ids, replayed steps (on a GPU: captured ones), and the collectives of all steps."""
    EveryRankPlans.world = world
    if not replay:
        recorded.MAX_TOKENS = 0
    with LLM(model, distributed_executor_backend=f"{__name__}:EveryRankPlans", **SETTINGS | settings) as llm:
        before = world.tensor.counts
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate(prompts()[: len(lengths)], params, use_tqdm=False)
        counts = {
            name: Count(*(now - then for now, then in zip(count, before.get(name, (0, 0)), strict=True)))
            for name, count in world.tensor.counts.items()
        }
        runner = llm.llm_engine.client.core.executor.worker.runner
        if runner.recorded is not None:
            replays = runner.recorded.replays
        else:
            replays = len(runner.graphs._captured) if runner.graphs is not None else 0
        return [list(one.outputs[0].token_ids) for one in outputs], replays, counts
