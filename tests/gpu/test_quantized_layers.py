"""Quantized experts, and members of a fused layer that differ in scheme, on a CUDA device, in graphs and without."""

import pytest
import torch

from quire.quantization import select
from tests.quantization import scaled_int8
from tests.quantization.test_methods import SCHEMES, generated, write_checkpoints
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scheme", ["all alike", "q, k and v differ", "experts differ"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_registered_method_serves_linears_and_experts(tmp_path, monkeypatch, family, scheme):
    monkeypatch.setattr(select, "_registered", {})
    scaled_int8.register()
    ours, plain = write_checkpoints(family, SCHEMES[scheme], tmp_path)
    wanted = generated(plain, device="cuda", dtype="float32")
    for eager in (True, False):
        assert generated(ours, device="cuda", dtype="float32", enforce_eager=eager) == wanted


def test_experts_in_fp8(tmp_path):
    save_tiny("qwen3-moe", tmp_path)
    found = [
        generated(tmp_path, device="cuda", dtype="bfloat16", quantization="fp8", enforce_eager=eager)
        for eager in (True, False)
    ]
    assert all(len(ids) == 12 for ids in found[0] + found[1])
