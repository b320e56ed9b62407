"""Encoders on a GPU."""

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from tests.encoders.tiny_encoders import FAMILIES, make_reference
from tests.kernels import encoder_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", encoder_cases.LENGTHS)
@pytest.mark.parametrize("case", encoder_cases.CASES)
def test_attention(case, lengths, dtype):
    encoder_cases.check(case, lengths, "cuda", dtype, padding=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors(tmp_path, family):
    reference = make_reference(family, tmp_path)
    params = PoolingParams(pooling_type="MEAN", use_activation=False)
    with LLM(reference.path, dtype="float32", skip_tokenizer_init=True, max_num_seqs=8) as llm:
        outputs = llm.encode(reference.prompts, params, use_tqdm=False)
    for output, hidden in zip(outputs, reference.hidden, strict=True):
        assert np.abs(output.outputs.data - hidden.mean(0).numpy()).max() < 1e-3
