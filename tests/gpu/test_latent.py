"""Latent attention on a CUDA device, in float32: the matrix of settings, with and without graphs."""

import pytest
import torch

from tests.gpu.test_parity import check
from tests.models.deepseek_checkpoints import save_with_mtp
from tests.tiny_models import make_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "minicpm3"])
def reference(request, tmp_path_factory):
    return make_reference(request.param, tmp_path_factory.mktemp(request.param), num_tokens=48)


@pytest.mark.parametrize(
    ("setting", "graphs"),
    [
        ("all at once", True),
        ("all at once", False),
        ("chunks of 16", True),
        ("preemption", True),
        ("depth 0", False),
        ("depth 2, chunks, preemption", True),
    ],
)
def test_equal_to_transformers(reference, setting, graphs):
    check(reference, setting, graphs)


def test_drafts_of_the_prediction_layer(tmp_path):
    from tests.models.test_deepseek import generate

    model = save_with_mtp(tmp_path)
    drafted = {"method": "mtp", "num_speculative_tokens": 2}
    assert generate(model, device="cuda", speculative_config=drafted) == generate(model, device="cuda")
