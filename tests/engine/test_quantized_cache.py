"""A KV cache in int8 with a scale per token and head, through the whole engine on a CPU."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import native
from tests.engine.memory_connector import MemoryConnector
from tests.tiny_models import NUM_TOKENS, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
INT8 = "int8_per_token_head"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference("llama", tmp_path_factory.mktemp("llama"))


def engine(reference, **arguments):
    defaults = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 22, "kv_cache_dtype": INT8}
    return LLM(reference.path, skip_tokenizer_init=True, **(defaults | arguments))


def generated(llm, prompts):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


@pytest.fixture(scope="module")
def tokens(reference):
    """Of each prompt alone, computed in one step."""
    with engine(reference, enable_prefix_caching=False) as llm:
        return [generated(llm, [prompt])[0][0] for prompt in reference.prompts]


def prompt_logprobs(llm, prompts):
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return torch.tensor([next(iter(found.values())).logprob for o in outputs for found in o.prompt_logprobs[1:]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_near_those_of_a_full_cache(reference, dtype):
    with engine(reference, kv_cache_dtype="auto") as llm:
        exact = prompt_logprobs(llm, reference.prompts)
    with engine(reference, dtype=dtype) as llm:
        error = (prompt_logprobs(llm, reference.prompts) - exact).abs()
    assert 0 < float(error.mean()) < 0.03 and float(error.max()) < 0.2


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},  # prompts in chunks
        {"num_gpu_blocks_override": 24},  # requests are preempted
        {"enable_prefix_caching": False, "async_scheduling": False},
        {"block_size": 8},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_steps_are_planned(reference, tokens, arguments):
    with engine(reference, **arguments) as llm:
        assert generated(llm, reference.prompts)[0] == tokens
        again, cached = generated(llm, reference.prompts)
        assert again == tokens
        assert any(cached) == arguments.get("enable_prefix_caching", True)


def test_half_the_memory_of_bfloat16(reference):
    counts = []
    for kept in ("auto", INT8):
        with engine(reference, dtype="bfloat16", kv_cache_dtype=kept) as llm:
            counts.append(llm.llm_engine.client.core.num_blocks)
            (layer, *_) = llm.llm_engine.client.core.executor.worker.model.cache_layers()
    head_size = layer.head_size
    assert counts[1] == pytest.approx(counts[0] * 2 * head_size / (head_size + 4), rel=0.02)
    assert layer.kv_cache.dtype is torch.int8


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_the_c_kernels_replay_steps(reference):
    with engine(reference, dtype="bfloat16") as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        first, second = (generated(llm, reference.prompts)[0] for _ in range(2))
        assert runner.backends.name == "native" and runner.recorded.replays > 0
    assert first == second


def test_a_connector_moves_scales_too(reference, tokens):
    MemoryConnector.store.clear()
    for saved in (False, True):
        with engine(reference, kv_connector="tests.engine.memory_connector:MemoryConnector") as llm:
            found, cached = generated(llm, reference.prompts)
            assert found == tokens and any(cached) == saved
            while (core := llm.llm_engine.client.core).has_unfinished():  # what is still being sent
                core.step()
