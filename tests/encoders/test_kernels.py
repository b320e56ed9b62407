"""Encoders' kernels in C against torch."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import ACTIVATIONS, kernel_number
from quire.kernels.layer_norm import fused_add_layer_norm
from quire.kernels.native import encoder
from quire.kernels.sum_rows import sum_rows, sum_rows_torch
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 64), (13, 70, 33), (130, 96, 40), (401, 384, 96)])
def test_normed_sum(rows, outputs, inputs, dtype):
    """The same bits as the linear layer and the norm by themselves."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype) * inputs**-0.5
    bias, residual = torch.randn(outputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    norm = (torch.rand(outputs), torch.randn(outputs), 1e-5)
    packed, before = encoder.pack(weight), residual.clone()
    found = encoder.linear(x, packed, outputs, bias, residual=residual, norm=norm)
    assert torch.equal(residual, before)
    assert torch.equal(found, fused_add_layer_norm(encoder.linear(x, packed, outputs, bias), residual, *norm)[0])


def test_gelu_of_extremes():
    x = torch.tensor([-1e4, -6.0, -5.5, -5.4, -1e-3, 0.0, 5.3, 5.4, 7.0, 1e4, float("nan")])[:, None]
    found = encoder.linear(x, encoder.pack(torch.ones(1, 1)), 1, None, kernel_number("gelu"))
    torch.testing.assert_close(found, F.gelu(x), rtol=1e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_chunks(dtype):
    x, firsts, counts = torch.randn(40, 33).to(dtype), [2, 10, 11], [8, 1, 29]
    torch.testing.assert_close(sum_rows(x, firsts, counts), sum_rows_torch(x, firsts, counts))
