"""A model with an encoder, through the real engine: what is encoded when, how often, and how long it is kept."""

import numpy as np
import pytest
import torch

from quire import Feature
from tests.features import test_embeddings as embeddings
from tests.features.encoder_model import ARCHITECTURE, CHANNELS, KIND, PATCHES_PER_TOKEN, encode, weights
from tests.features.test_embeddings import FEW_BLOCKS, GREEDY, HIDDEN, PROMPTS, models, random_embeds

__all__ = ["models"]

SETTINGS = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "a small cache": {"encoder_cache_size": 20},
    "a small cache, chunks of 7, depth 2": {"encoder_cache_size": 20, "max_num_batched_tokens": 7, "async_depth": 2},
    "preempted": FEW_BLOCKS | {"encoder_cache_size": 30},
    "no prefix caching": {"enable_prefix_caching": False},
    "a prompt at once": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
}


def engine(models, **options):
    return embeddings.engine(models, hf_overrides={"architectures": [ARCHITECTURE]}, **options)


def image(start, length, seed=0):
    patches = np.random.default_rng(seed).normal(0, 2, (PATCHES_PER_TOKEN * length, CHANNELS))
    return Feature(KIND, start, length, patches.astype(np.float32))


def images_of(ids, seed=0):
    """Two, of up to 20 tokens, and an embedding between them."""
    if len(ids) < 20:
        return [image(1, 2, seed)]
    length = min(20, len(ids) // 3)
    return [
        image(2, length, seed),
        Feature("embeds", 2 + length, 1, random_embeds(1)),
        image(4 + length, length, seed + 1),
    ]


def encoded(features):
    """The same as embeddings, for the reference."""
    with torch.no_grad():
        made = [
            encode(torch.from_numpy(f.data), weights(HIDDEN)).numpy() if f.kind == KIND else f.data for f in features
        ]
    return [Feature("embeds", f.start, f.length, data) for f, data in zip(features, made, strict=True)]


def generate(llm, which=PROMPTS, seed=0):
    return llm.generate(
        [{"prompt_token_ids": ids, "features": images_of(ids, seed)} for ids in which], GREEDY, use_tqdm=False
    )


def assert_equal(models, outputs, which=PROMPTS, seed=0):
    for output, ids in zip(outputs, which, strict=True):
        embeddings.assert_equal(models("llama")[1], output, ids, encoded(images_of(ids, seed)))


def parts(llm):
    """The core's cache and the worker's store."""
    core = llm.llm_engine.client.core
    return core.scheduler.features.cache, core.executor.worker.runner.features


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_the_reference(models, setting):
    options = SETTINGS[setting]
    with engine(models, **options) as llm:
        for seed in (0, 0, 1):
            assert_equal(models, generate(llm, seed=seed), seed=seed)
        cache, store = parts(llm)
        assert (llm.llm_engine.stats.num_preemptions > 0) == ("preempted" in setting)
        assert not any(cache.owners.values()) and set(store.encoded) == set(cache.lengths)
        assert sum(map(len, store.encoded.values())) <= options.get("encoder_cache_size", 8192)
        assert not store.rows


def test_equal_content_is_encoded_once_and_again_after_it_was_evicted(models):
    with engine(models, encoder_cache_size=40, enable_prefix_caching=False) as llm:
        model = llm.llm_engine.client.core.executor.worker.model
        ids = PROMPTS[-1]
        generate(llm, [ids, ids, ids])
        generate(llm, [ids])
        assert model.num_encoded == 2  # two images of 20 tokens
        assert_equal(models, generate(llm, [ids], seed=10), [ids], seed=10)
        assert model.num_encoded == 4
        assert_equal(models, generate(llm, [ids]), [ids])
        assert model.num_encoded == 6
        llm.reset_prefix_cache()
        generate(llm, [ids])
        assert model.num_encoded == 8


def test_what_a_cached_prefix_covers_is_not_encoded(models):
    with engine(models, encoder_cache_size=20) as llm:
        model = llm.llm_engine.client.core.executor.worker.model
        ids = PROMPTS[-1]  # images at 2 to 21 and 24 to 43: the cache ends with the second
        generate(llm, [ids])
        (again,) = generate(llm, [ids])
        assert again.num_cached_tokens == 80 and model.num_encoded == 2


def test_a_failure_of_the_encoder_ends_its_requests_alone(models):
    with engine(models, max_num_batched_tokens=64) as llm:
        llm.llm_engine.client.core.executor.worker.model.failures = 1
        failed, *_ = generate(llm, PROMPTS[-1:])
        assert "out of order" in str(failed.error) and failed.outputs[0].finish_reason == "error"
        assert_equal(models, generate(llm))
        cache, store = parts(llm)
        assert set(store.encoded) == set(cache.lengths)


def test_what_the_encoder_cannot_hold_or_make(models):
    with engine(models, encoder_cache_size=10) as llm:
        ids = [1] * 30
        with pytest.raises(ValueError, match="at most 10 are allowed"):
            llm.generate({"prompt_token_ids": ids, "features": [image(0, 11)]}, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="has image, embeds"):
            audio = Feature("audio", 0, 1, random_embeds(1))
            llm.generate({"prompt_token_ids": ids, "features": [audio]}, GREEDY, use_tqdm=False)
        short = Feature(KIND, 0, 4, image(0, 3).data)
        (output,) = llm.generate({"prompt_token_ids": ids, "features": [short]}, GREEDY, use_tqdm=False)
        assert "it must make [4, 64]" in str(output.error)
    with pytest.raises(ValueError, match="--encoder-cache-size"):
        engine(models, enable_chunked_prefill=False, max_num_batched_tokens=256, encoder_cache_size=255)
