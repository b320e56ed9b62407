"""Workers in processes of their own: they say what one process says, and end together."""

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from tests.tiny_models import save_tiny

PROMPTS = [[5, 6, 7], list(range(3, 40)), [209, 210, 105, 106, 107] * 4, [4, 8, 15, 16, 23, 42]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=5, max_tokens=12, repetition_penalty=1.3),
]
SMALL = {"max_model_len": 128, "dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


def start(model, **options):
    return LLM(model, skip_tokenizer_init=True, **SMALL, **options)


def outputs(llm):
    found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.fixture(scope="module")
def wanted(model):
    llm = start(model)
    try:
        return outputs(llm)
    finally:
        llm.shutdown()


def test_two_processes_say_what_one_says(model, wanted):
    llm = start(model, tensor_parallel_size=2)
    try:
        assert outputs(llm) == wanted
        assert llm.collective_rpc("get_draft_profile")[0] == llm.collective_rpc("get_draft_profile")[1]
    finally:
        llm.shutdown()


def test_sizes_and_executors():
    config = EngineConfig.from_kwargs(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert config.parallel.num_ranks == 6
    with pytest.raises(ValueError, match=r"'uni' has one worker, .* is 6; use 'mp'"):
        EngineConfig.from_kwargs(tensor_parallel_size=2, pipeline_parallel_size=3, distributed_executor_backend="uni")


def test_a_rank_that_never_joins(model):
    """Nothing is imported in a second."""
    with pytest.raises(RuntimeError, match=r"rank 0, 1 of 2 did not start within 1 s \(--distributed-timeout-seconds"):
        start(model, tensor_parallel_size=2, distributed_timeout_seconds=1)
