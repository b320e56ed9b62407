"""Prompts with features on a GPU: graphs for steps of text, none for steps with features, the same text."""

import numpy as np
import pytest
import torch

from quire import Feature
from tests.features import test_embeddings as embeddings
from tests.features import test_encoder as encoder
from tests.features import test_positions as positions
from tests.features.test_embeddings import PROMPTS, features_of, models, with_features
from tests.features.test_positions import model

pytestmark = pytest.mark.gpu
__all__ = ["model", "models"]

SETTINGS = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 128},
    "eager": {"enforce_eager": True},
    "drafts": {"spec_method": "tests.spec_decode.proposers:Fixed", "spec_tokens": 2, "spec_adaptive": False},
}


def assert_equal(output, tokens, logprobs, tolerance=0.02):
    """Up to a token that was nearly as good."""
    found = output.outputs[0]
    for token, wanted, logprob, entry in zip(found.token_ids, tokens, logprobs, found.logprobs, strict=True):
        assert entry[token].logprob == pytest.approx(logprob, abs=tolerance)
        if token != wanted:
            break


@pytest.mark.parametrize("setting", SETTINGS)
def test_embeddings_equal_the_reference(models, setting):
    with embeddings.engine(models, **SETTINGS[setting]) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        assert (runner.graphs is None) == (setting == "eager")
        text = [{"prompt_token_ids": ids} for ids in PROMPTS]
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate([*map(with_features, PROMPTS), *text], embeddings.GREEDY, use_tqdm=False)
            for output, ids in zip(outputs, PROMPTS, strict=False):
                assert_equal(output, *embeddings.reference(models("llama")[1], ids, features_of(ids)))
            for output, ids in zip(outputs[len(PROMPTS) :], PROMPTS, strict=True):
                assert_equal(output, *embeddings.reference(models("llama")[1], ids, []))


@pytest.mark.parametrize("setting", ["batched", "chunks of 7"])
def test_an_encoder_equals_the_reference(models, setting):
    with encoder.engine(models, encoder_cache_size=20, **SETTINGS[setting]) as llm:
        for seed in (0, 0, 1):
            for output, ids in zip(encoder.generate(llm, seed=seed), PROMPTS, strict=True):
                made = encoder.encoded(encoder.images_of(ids, seed))
                assert_equal(output, *embeddings.reference(models("llama")[1], ids, made))


@pytest.mark.parametrize("setting", SETTINGS)
def test_positions_of_three_axes_equal_the_reference(model, setting):
    """Generated tokens go through graphs, with the row's shift."""
    with positions.engine(model, **SETTINGS[setting]) as llm:
        made = [{"prompt_token_ids": ids, "features": positions.features_of(ids)} for ids in positions.PROMPTS]
        text = [{"prompt_token_ids": ids} for ids in positions.PROMPTS]
        outputs = llm.generate([*made, *text], positions.GREEDY, use_tqdm=False)
        for output, ids in zip(outputs, positions.PROMPTS, strict=False):
            assert_equal(output, *positions.reference(model, ids, positions.features_of(ids)))
        for output, ids in zip(outputs[len(positions.PROMPTS) :], positions.PROMPTS, strict=True):
            assert_equal(output, *positions.reference(model, ids, []))


def test_embeddings_on_the_device(models):
    """As a user's own code has them."""
    with embeddings.engine(models) as llm:
        embeds = torch.from_numpy(embeddings.random_embeds(20)).cuda()
        (output,) = llm.generate({"prompt_embeds": embeds}, embeddings.GREEDY, use_tqdm=False)
        made = [Feature("embeds", 0, 20, np.asarray(embeds.cpu()))]
        assert_equal(output, *embeddings.reference(models("llama")[1], [0] * 20, made))
