"""Encoders' kernels in C against torch."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import ACTIVATIONS, kernel_number
from quire.kernels.native import encoder
from tests.kernels import encoder_cases

pytestmark = pytest.mark.skipif(
    not encoder.serves_encoders(torch.empty(1)), reason="no compiler, or no AVX-512 with bf16 instructions"
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", encoder_cases.LENGTHS)
@pytest.mark.parametrize("case", encoder_cases.CASES)
def test_attention(case, lengths, dtype):
    encoder_cases.check(case, lengths, "cpu", dtype, padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 64), (13, 70, 33), (40, 384, 384), (5, 1, 1)])
def test_linear(rows, outputs, inputs, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype) * inputs**-0.5
    bias = torch.randn(outputs).to(dtype)
    packed, tolerance = encoder.pack(weight), 1e-5 if dtype is torch.float32 else 3e-2
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert (encoder.linear(x, packed, outputs, bias).float() - expected).abs().max() < tolerance
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        found = encoder.linear(x, packed, outputs, None, kernel_number(name)).float()
        assert (found - ACTIVATIONS[name](expected - bias.float())).abs().max() < tolerance
