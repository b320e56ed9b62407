"""Layers of different kinds of cache, heads and head sizes through the real engine, equal to a reference in torch."""

import logging

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import native
from tests.cache_kinds.latent import OwnLatentSpec
from tests.cache_kinds.mixed_model import ARCHITECTURE, BIDIRECTIONAL, LAYERS, dense_logprobs
from tests.cache_kinds.recurrent import RecurrentSpec
from tests.tiny_models import prompts, save_tiny

PROMPTS = prompts((1, 5, 31, 32, 33, 64, 65, 100, 130), 211)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
FEW_BLOCKS = {"num_gpu_blocks_override": 44, "max_model_len": 176}
SETTINGS = {
    "batched": {},
    "chunks of 24": {"max_num_batched_tokens": 24},
    "preempted": FEW_BLOCKS,
    "depth 0": {"async_scheduling": False},
    "depth 2, chunks, preempted": {"async_depth": 2, "max_num_batched_tokens": 24, **FEW_BLOCKS},
    "block size 4": {"block_size": 4},
    "no prefix caching": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return str(path)


def engine(folder, architecture=ARCHITECTURE, **options):
    overrides = {"architectures": [architecture], "num_hidden_layers": len(LAYERS), "head_dim": 16}
    defaults = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    if "num_gpu_blocks_override" in options:
        del defaults["kv_cache_memory_bytes"]
    return LLM(
        folder, load_format="dummy", hf_overrides=overrides, skip_tokenizer_init=True, **{**defaults, **options}
    )  # fmt: skip


def worker_of(llm):
    return llm.llm_engine.client.core.executor.worker


def generate(llm, which=PROMPTS, params=GREEDY):
    return llm.generate([{"prompt_token_ids": ids} for ids in which], params, use_tqdm=False)


def assert_equal(llm, outputs, which=PROMPTS, tolerance=1e-3):
    sequences = [[*prompt, *one.outputs[0].token_ids] for prompt, one in zip(which, outputs, strict=True)]
    for prompt, one, wanted in zip(which, outputs, dense_logprobs(worker_of(llm).model, sequences), strict=True):
        completion = one.outputs[0]
        assert len(completion.token_ids) == GREEDY.max_tokens
        for j, token in enumerate(completion.token_ids):
            scores = wanted[len(prompt) - 1 + j]
            assert completion.logprobs[j][token].logprob == pytest.approx(float(scores[token]), abs=tolerance)
            assert float(scores[token]) == pytest.approx(float(scores.max()), abs=tolerance), f"token {j}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_the_reference(folder, setting):
    with engine(folder, **SETTINGS[setting]) as llm:
        assert_equal(llm, generate(llm))
        assert (llm.llm_engine.stats.num_preemptions > 0) == ("preempted" in setting)


def test_cached_prefixes_of_all_kinds(folder):
    with engine(folder) as llm:
        generate(llm)
        warm = generate(llm)
        assert_equal(llm, warm)
        # All kinds hit at 64: the largest block, and twice the states' checkpoints.
        assert [one.num_cached_tokens for one in warm] == [(len(prompt) - 1) // 64 * 64 for prompt in PROMPTS]


def test_equal_prompts_of_one_plan(folder):
    """A state is not there before its scan: the second cannot begin from the first's."""
    with engine(folder) as llm:
        twice = [PROMPTS[-1], PROMPTS[-1]]
        outputs = generate(llm, twice)
        assert_equal(llm, outputs, twice)
        assert [one.num_cached_tokens for one in outputs] == [0, 0]


def test_completions_that_share_a_prompt(folder):
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    with engine(folder) as llm:
        for one, prompt in zip(generate(llm, params=params), PROMPTS, strict=True):
            sequences = [[*prompt, *completion.token_ids] for completion in one.outputs]
            for completion, wanted in zip(one.outputs, dense_logprobs(worker_of(llm).model, sequences), strict=True):
                for j, token in enumerate(completion.token_ids):
                    score = float(wanted[len(prompt) - 1 + j][token])
                    assert completion.logprobs[j][token].logprob == pytest.approx(score, abs=1e-3)


def test_groups_and_their_backends(folder, caplog):
    with caplog.at_level(logging.DEBUG, "quire"), engine(folder) as llm:
        runner = worker_of(llm).runner
        by_kind = {}
        for layer in worker_of(llm).model.cache_layers():
            spec = layer.kv_cache_spec(16, torch.float32)
            by_kind.setdefault(type(spec), set()).add(layer.backend.name)
            assert layer.backend is runner.backends.by_group[layer.group]
        assert by_kind[OwnLatentSpec] == {"latent-torch"} and by_kind[RecurrentSpec] == {"scan-torch"}
        assert len(runner.backends.distinct) == 3 and len(by_kind) == 4
        assert runner.graphs is None and runner.recorded is None
        # The latents' kernels have pages of 8 tokens, the allocator blocks of 64.
        latent = worker_of(llm).model.cache_layers()[1]
        assert latent.views[0].shape[1:] == (8, 36)
        assert runner.block_sizes[latent.group] == 64 and runner.rows.block_sizes[latent.group] == 8
    assert "attention backend scan-torch: it serves RecurrentSpec" in caplog.text


def test_drafts_need_a_cache_that_rolls_back(folder):
    config = {"method": "tests.spec_decode.proposers:Fixed", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="rolled back"):
        engine(folder, speculative_config=config)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_groups_of_one_kind_may_have_different_backends(folder):
    """In bf16 the C kernels serve those whose pages have no gaps."""
    with engine(folder, dtype="bfloat16") as llm:
        layers = worker_of(llm).model.cache_layers()
        assert [layer.backend.name for layer in layers[::2]] == ["torch", "native", "torch", "latent-torch"]
        assert not worker_of(llm).runner.backends.supports_replay
        assert_equal(llm, generate(llm), tolerance=0.25)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_that_see_their_whole_prompt(folder, dtype):
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
    with engine(folder, BIDIRECTIONAL, dtype=dtype, max_num_batched_tokens=300) as llm:
        assert {backend.name for backend in worker_of(llm).runner.backends.distinct} == {"torch"}
        generate(llm, params=one_token)
        outputs = generate(llm, params=one_token)
        assert all(one.num_cached_tokens == 0 for one in outputs)
        for one, wanted in zip(outputs, dense_logprobs(worker_of(llm).model, PROMPTS), strict=True):
            (token,) = one.outputs[0].token_ids
            tolerance = 1e-3 if dtype == "float32" else 0.25
            assert one.outputs[0].logprobs[0][token].logprob == pytest.approx(float(wanted[-1][token]), abs=tolerance)
    with pytest.raises(ValueError, match="a step must hold a whole prompt"):
        engine(folder, BIDIRECTIONAL, max_num_batched_tokens=32)
