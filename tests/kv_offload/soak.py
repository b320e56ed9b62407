"""Random traffic on an engine with a small device cache and a CPU tier; every answer must be that of one with room.

    python -m tests.kv_offload.soak [--seconds 600] [--seed 0] [--families llama gemma3]

Conversations that share prefixes come back at random, some are aborted, the prefix cache is reset now and then. One
engine after the other, with other settings: copies in the order of plans, and overlapping steps as on a GPU. In the end
nothing may be held: no block, no slot.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from tests.tiny_models import save_tiny

NUM_BLOCKS = {"llama": 24, "gemma3": 40}
MAX_LEN = 160


def conversations(draw: random.Random, count: int) -> list[list[int]]:
    """Prompts, many of which begin like others."""
    found = [[draw.randrange(1, 211) for _ in range(draw.randrange(1, 60))]]
    while len(found) < count:
        begin = draw.choice(found) if draw.random() < 0.7 else []
        prompt = [*begin, *(draw.randrange(1, 211) for _ in range(draw.randrange(1, 40)))]
        found.append(prompt[: MAX_LEN - 40])
    return found


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5 + number % 30, ignore_eos=True)


def expected(path: str, prompts: list[list[int]]) -> list[list[int]]:
    room = {"kv_cache_memory_bytes": 1 << 25, "kv_offloading_size": 0}
    with LLM(path, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN, **room) as llm:
        outputs = llm.generate(prompts, [params(i) for i in range(len(prompts))], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def serve(llm: LLM, prompts: list[list[int]], texts: list[list[int]], draw: random.Random, until: float) -> int:
    """Requests answered, each compared with its text."""
    engine, running, answered, number = llm.llm_engine, {}, 0, 0
    while time.monotonic() < until or running:
        while time.monotonic() < until and len(running) < 8 and draw.random() < 0.5:
            which = draw.randrange(len(prompts))
            number += 1
            running[str(number)] = which
            engine.add_request(str(number), prompts[which], params(which))
        for output in engine.step():
            if output.finished and output.request_id in running:
                which = running.pop(output.request_id)
                found = list(output.outputs[0].token_ids)
                assert found == texts[which], f"conversation {which}: {found} instead of {texts[which]}"
                answered += 1
        if running and draw.random() < 0.01:
            aborted = draw.choice(list(running))
            del running[aborted]
            engine.abort_request([aborted])
        if draw.random() < 0.001:
            llm.reset_prefix_cache()
    return answered


def check_nothing_is_held(llm: LLM) -> None:
    core = llm.llm_engine.client.core
    worker = core.executor.worker.runner.transfers
    while core.has_unfinished():
        core.step()
    assert core.state()["blocks_free"] == core.num_blocks, "blocks are held"
    worker.connectors[0].copier.drain()
    (tier,) = core.scheduler.transfers.connectors
    for report in worker.get_finished()[0].reports:
        tier.worker_reported(report)
    assert tier.index.num_busy == 0, "slots are held"


def settings(draw: random.Random) -> dict[str, Any]:
    blocks = draw.choice([4, 40, 400])
    slot = 4 * 2 * 2 * 16 * 16 * 4  # of the tiny models: layers, keys and values, heads, tokens, size, bytes
    extra = {"cpu_bytes_to_use": blocks * slot * 4, "eviction_policy": draw.choice(["lru", "arc"])}
    name = draw.choice(["OffloadingConnector", "tests.kv_offload.threaded_tier:threaded_tier"])
    return {
        "kv_transfer_config": {"kv_connector": name, "kv_connector_extra_config": extra},
        "async_scheduling": draw.random() < 0.8,
        "max_num_batched_tokens": draw.choice([24, 64, 512]),
        "max_num_seqs": draw.choice([2, 8]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", default=["llama", "gemma3"])
    given = parser.parse_args()
    draw, end, answered = random.Random(given.seed), time.monotonic() + given.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for family in given.families:
            path = Path(folder) / family
            save_tiny(family, path)
            prompts = conversations(draw, 60)
            models[family] = (str(path), prompts, expected(str(path), prompts))
        while time.monotonic() < end:
            family = draw.choice(given.families)
            path, prompts, texts = models[family]
            options = settings(draw)
            blocks = NUM_BLOCKS[family]
            with LLM(
                path, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN, num_gpu_blocks_override=blocks,
                **options,
            ) as llm:  # fmt: skip
                until = min(end, time.monotonic() + max(5.0, given.seconds / 20))
                answered += serve(llm, prompts, texts, draw, until)
                check_nothing_is_held(llm)
                (tier,) = llm.llm_engine.client.core.scheduler.transfers.connectors
                print(family, options, tier.stats(), f"{answered} answers", flush=True)
    assert answered, "nothing was answered"


if __name__ == "__main__":
    main()
