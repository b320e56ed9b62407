"""Drafts that a proposer draws, on a GPU: the kernels, and the distribution of texts."""

import numpy as np
import pytest
import torch

from quire.kernels.sample_tokens import Draw
from tests.kernels import draft_cases
from tests.spec_decode.sampling_cases import NUM_ROWS, count_texts, p_value, probabilities, write_texts
from tests.spec_decode.test_sampled_drafts import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("draw", [Draw.RANDOM, Draw.WARPED])
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(50, 50), (2500, 1100), (152_064, 32_000), (49_152, 49_152)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_torch(vocab, draft_vocab, draw, dtype):
    draft_cases.check_sampled(vocab, draft_vocab, draw, "cuda", dtype)


@pytest.mark.parametrize("name", ["far", "five drafts", "all", "few tokens", "few tokens, filtered"])
def test_texts_have_the_distribution_of_the_target(name):
    half = NUM_ROWS // 2  # a grid of a GPU has at most 65,535 rows in its second dimension
    texts = np.concatenate([write_texts(CASES[name], "cuda", half, first)[0] for first in (0, half)])
    assert p_value(count_texts(texts), probabilities(CASES[name].params)) > 0.01
