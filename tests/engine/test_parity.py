"""Greedy output equals transformers' token for token, whatever the batching, chunking, caching or preemption."""

import os

import pytest

from quire import LLM, SamplingParams
from quire.kernels import native
from tests.tiny_models import CORE, FAMILIES, NUM_TOKENS, Reference, make_reference

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)

# Little more than one request of full length needs.
FEW_BLOCKS = {"num_gpu_blocks_override": 15, "max_model_len": 176}

# name -> engine arguments
SETTINGS = {
    "all at once": {},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "long prefill threshold": {"long_prefill_token_threshold": 7},
    "preemption": FEW_BLOCKS,
    "block size 1": {"block_size": 1},
    "block size 32": {"block_size": 32},
    "no prefix caching": {"enable_prefix_caching": False},
    "depth 0": {"async_scheduling": False},
    "depth 2": {"async_depth": 2},
    "depth 2, chunks, preemption": {
        "async_depth": 2,
        "max_num_batched_tokens": 24,
        **FEW_BLOCKS,
    },
    "three at a time": {"max_num_seqs": 3},
    "native attention": {"attention_backend": "native" if native.library() else None, "max_num_batched_tokens": 40},
}


@pytest.fixture(scope="session", params=FAMILIES if os.environ.get("QUIRE_ALL_MODELS") else CORE)
def reference(request, tmp_path_factory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


def engine(reference: Reference, **arguments) -> LLM:
    if "num_gpu_blocks_override" in arguments:
        arguments["num_gpu_blocks_override"] *= reference.num_groups
    return LLM(
        reference.path,
        dtype="float32",
        skip_tokenizer_init=True,
        **{"kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, **arguments},
    )


def assert_equal(outputs, reference: Reference, which=None) -> None:
    for i, output in zip(which if which is not None else range(len(reference.prompts)), outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == reference.token_ids[i], f"prompt {i}"
        assert completion.finish_reason == "length"
        chosen = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert chosen == pytest.approx(reference.logprobs[i], abs=1e-3), f"prompt {i}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_transformers(reference, setting):
    with engine(reference, **SETTINGS[setting]) as llm:
        outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert_equal(outputs, reference)
        preemptions = sum(output.metrics.num_preemptions for output in outputs)
        assert preemptions == llm.llm_engine.stats.num_preemptions
        if "preemption" in setting:
            assert preemptions > 0
            (found,) = [one for one in llm.get_metrics() if one.name == "quire:request_num_preemptions"]
            assert (found.sum, found.count) == (preemptions, len(outputs))


def test_one_by_one_then_warm_from_the_cache(reference):
    with engine(reference) as llm:
        for i, prompt in enumerate(reference.prompts):
            assert_equal(llm.generate(prompt, GREEDY, use_tqdm=False), reference, [i])
        warm = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert_equal(warm, reference)
        lengths = [len(prompt) for prompt in reference.prompts]
        assert [o.num_cached_tokens for o in warm] == [(n - 1) // 16 * 16 for n in lengths]
        assert llm.reset_prefix_cache()
        cold = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
        assert_equal(cold, reference)
        assert all(o.num_cached_tokens == 0 for o in cold)


def test_equal_prompts_in_one_plan_share_blocks(reference):
    with engine(reference) as llm:
        outputs = llm.generate([reference.prompts[6]] * 3, GREEDY, use_tqdm=False)
        assert_equal(outputs, reference, [6, 6, 6])
        assert [o.num_cached_tokens for o in outputs] == [0, 48, 48]


@pytest.mark.parametrize("depth", [0, 1])
def test_forks(reference, depth):
    """Completions of one prompt share its blocks, but for the last, which each writes for itself."""
    most_likely = GREEDY.replace(temperature=1.0, top_k=1, n=3, seed=0)
    options = {"async_depth": depth} if depth else {"async_scheduling": False}
    with engine(reference, **options) as llm:
        for i, output in enumerate(llm.generate(reference.prompts, most_likely, use_tqdm=False)):
            assert [one.token_ids for one in output.outputs] == [reference.token_ids[i]] * 3, f"prompt {i}"


def test_requests_that_come_and_go(reference):
    """Staggered arrivals and aborts must not affect other requests."""
    with engine(reference, max_num_batched_tokens=32) as llm:
        core, got = llm.llm_engine, {}
        for i, prompt in enumerate(reference.prompts):
            core.add_request(f"keep {i}", prompt, GREEDY)
            core.add_request(f"drop {i}", reference.prompts[-1 - i], GREEDY)
            for _ in range(3):
                for output in core.step():
                    got[output.request_id] = output
            core.abort_request(f"drop {i}")
        while core.has_unfinished_requests():
            for output in core.step():
                got[output.request_id] = output
        assert_equal([got[f"keep {i}"] for i in range(8)], reference)
