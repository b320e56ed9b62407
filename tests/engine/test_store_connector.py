"""KV-cache blocks in stores, through the whole engine."""

import pytest

from quire import LLM, SamplingParams
from quire.distributed.kv_offload.block_file import SECTOR
from quire.distributed.kv_offload.folder_upkeep import block_files
from tests.tiny_models import NUM_TOKENS, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def reference(request, tmp_path_factory):
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_reference("llama", tmp_path_factory.mktemp("llama"))


def engine(reference, folder, **arguments):
    arguments = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 25} | arguments
    return LLM(reference.path, skip_tokenizer_init=True, kv_offloading_path=str(folder), **arguments)


def depth_of(depth):
    return {"async_scheduling": False} if depth == "sync" else {"async_depth": depth}


def core_of(llm):
    return llm.llm_engine.client.core


def generate(llm, reference):
    """The number of cached tokens of each prompt; texts must be right, and nothing may be held at the end."""
    outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == reference.token_ids
    core = core_of(llm)
    while core.has_unfinished():
        core.step()
    pool = core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks
    return [o.num_cached_tokens for o in outputs]


def tier(llm):
    return core_of(llm).scheduler.transfers.connectors[-1]


def all_but_the_last(reference, llm):
    size = core_of(llm).scheduler.kv.alignment
    return [(len(prompt) - 1) // size * size for prompt in reference.prompts]


@pytest.mark.parametrize("depth", ["sync", 1, 2])
def test_a_restarted_engine_finds_what_the_last_has_computed(reference, tmp_path, depth):
    with engine(reference, tmp_path, **depth_of(depth)) as llm:
        assert generate(llm, reference) == [0] * 8
    with engine(reference, tmp_path, **depth_of(depth)) as llm:
        assert generate(llm, reference) == all_but_the_last(reference, llm)
        stats = tier(llm).stats()
        assert stats.hits == sum(all_but_the_last(reference, llm)) and stats.loaded_blocks > 0
        assert stats.dropped_blocks == {"busy": 0, "evicted": 0} and not any(stats.errors.values())


def test_nothing_but_blocks_stays_in_the_folder(llama, tmp_path):
    with engine(llama, tmp_path) as llm:
        generate(llm, llama)
        worker = core_of(llm).executor.worker.runner.transfers.connectors[-1]
    files = list(block_files(tmp_path))
    assert len(files) == worker._store.stats.writes.hits > 0
    assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) == len(files)
    assert all(size % SECTOR == 0 for _, size, _ in files)
