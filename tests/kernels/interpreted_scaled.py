"""Products of 8-bit rows and weights against their torch references, in Triton's interpreter (test_interpreter.py)."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.quantize_fp8 import quantize_fp8_torch, quantize_torch
from quire.kernels.scaled_linear import dequantize_fp8, dequantize_fp8_torch, scaled_linear
from quire.kernels.scaled_table import ScaledConfig
from quire.kernels.skinny_linear import skinny_linear_torch
from quire.kernels.triton.scaled_linear import scale_products

CONFIGS = {
    "tma": ScaledConfig(16, 32, 32, stages=2),
    "pointers": ScaledConfig(32, 16, 32, stages=2, tma=False),
    "part of a group": ScaledConfig(16, 16, 16, stages=2),
    "several groups of outputs": ScaledConfig(16, 64, 32, stages=2),
}


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_scale_per_block(name, with_bias):
    torch.manual_seed(0)
    rows, n, k, groups = 37, 96, 160, (32, 32)
    weight = quantize_fp8_torch(tensor(n, k))[0]
    scale = torch.rand(n // 32, k // 32) * 0.01
    q, x_scale = quantize_fp8_torch(tensor(rows, k), group=32)
    bias = tensor(n) if with_bias else None
    wanted = skinny_linear_torch(
        q, weight, bias, weight_scale=scale, x_scale=x_scale, groups=groups, out_dtype=torch.float16
    )
    got = scaled_linear(q, weight, x_scale, scale, bias, torch.float16, groups, CONFIGS[name])
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("config", [*CONFIGS.values(), ScaledConfig(16, 32, 64, stages=2, tma=False)])
def test_int8(config):
    rows, n, k = 37, 80, 160
    (q, x_scale), (weight, scale) = (quantize_torch(tensor(m, k), dtype=torch.int8) for m in (rows, n))
    bias = tensor(n)
    wanted = skinny_linear_torch(q, weight, bias, weight_scale=scale, x_scale=x_scale, out_dtype=torch.float32)
    got = scaled_linear(q, weight, x_scale, scale, bias, torch.float32, config=config)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)
    products = q.int() @ weight.int().T
    torch.testing.assert_close(scale_products(products, x_scale, scale, bias, torch.float32), wanted)


@pytest.mark.parametrize("groups", [None, (32, 32), (16, 64)])
def test_dequantize(groups):
    weight = quantize_fp8_torch(tensor(3 * 64, 192))[0].view(3, 64, 192)
    scale = torch.rand(3, 64) if groups is None else torch.rand(3, 64 // groups[0], 192 // groups[1])
    got = dequantize_fp8(weight, scale, groups, torch.float16)
    assert torch.equal(got, dequantize_fp8_torch(weight, scale, groups, torch.float16))
