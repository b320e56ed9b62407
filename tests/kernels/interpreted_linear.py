"""Triton kernels of the linears against their torch references, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.quantize_fp8 import (
    quantize_fp8,
    quantize_fp8_torch,
    quantize_int8,
    quantize_torch,
    rms_norm_quant,
    rms_norm_quant_torch,
    silu_mul_quant,
    silu_mul_quant_torch,
)
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import skinny_linear, skinny_linear_torch
from quire.kernels.skinny_table import SkinnyConfig
from quire.kernels.triton.skinny_linear import SplitWorkspace

K = 192  # no multiple of every block
CONFIGS = {
    "gemv, one step": SkinnyConfig("gemv", 8, 256),
    "gemv, loop": SkinnyConfig("gemv", 4, 64),
    "gemv, ragged loop": SkinnyConfig("gemv", 4, 128),
    "dot": SkinnyConfig("dot", 16, 64, stages=2),
    "dot, ragged": SkinnyConfig("dot", 16, 128, stages=2),
    "dot, split": SkinnyConfig("dot", 16, 32, stages=2, splits=4),
}
FUSED = ("plain", "bias", "residual", "silu", "silu, bias, residual")
FUSED_IN_GEMV = ("norm", "norm, silu")
CASES = [
    (rows, name, fused)
    for name, config in CONFIGS.items()
    for rows in ((1, 3) if config.kind == "gemv" else (3, 21))
    for fused in FUSED + (FUSED_IN_GEMV if config.kind == "gemv" else ())
]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


@pytest.mark.parametrize(("rows", "name", "fused"), CASES)
def test_skinny_linear(rows, name, fused):
    config = CONFIGS[name]
    torch.manual_seed(rows)
    n = 40  # no multiple of the tile
    arguments: dict = {"silu": "silu" in fused}
    outputs = 2 * n if "silu" in fused else n
    if "bias" in fused:
        arguments["bias"] = tensor(outputs)
    if "residual" in fused:
        arguments["residual"] = tensor(rows, n)
    if "norm" in fused:
        arguments["norm"] = (tensor(K), 1e-5)
    wide = tensor(rows, 2 * K)
    x, weight = wide[:, :K], tensor(outputs, K)  # rows of x apart, as in a slice of a larger tensor
    wanted = skinny_linear_torch(x, weight, **arguments)
    got = skinny_linear(x, weight, config=config, **arguments)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    assert not SplitWorkspace.of(x.device).arrived.any()


@pytest.mark.parametrize("name", CONFIGS)
def test_scales(name):
    config = CONFIGS[name]
    x, weight = tensor(3, K), tensor(40, K)
    scales = {"weight_scale": torch.rand(40) + 0.5, "x_scale": torch.rand(3) + 0.5}
    wanted = skinny_linear_torch(x, weight, **scales)
    torch.testing.assert_close(skinny_linear(x, weight, config=config, **scales), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_weights(name):
    config = CONFIGS[name]
    weight, weight_scale = quantize_fp8_torch(tensor(40, K))
    x, x_scale = tensor(3, K), None
    if config.kind == "dot":
        x, x_scale = quantize_fp8_torch(x)
    arguments = {"weight_scale": weight_scale, "x_scale": x_scale, "out_dtype": torch.float16}
    wanted = skinny_linear_torch(x, weight, **arguments)
    torch.testing.assert_close(skinny_linear(x, weight, config=config, **arguments), wanted, atol=2e-2, rtol=2e-2)


BLOCKED = {
    "gemv, one step": SkinnyConfig("gemv", 8, 256),
    "gemv, loop": SkinnyConfig("gemv", 4, 64),
    "gemv, ragged loop": SkinnyConfig("gemv", 4, 128),
    "dot": SkinnyConfig("dot", 16, 32, stages=2),
    "dot, part of a group": SkinnyConfig("dot", 16, 16, stages=2),
    "dot, split": SkinnyConfig("dot", 16, 32, stages=2, splits=4),
}


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", BLOCKED)
def test_a_scale_per_block(name, quantized, silu):
    config, groups, n = BLOCKED[name], (16, 32), 48
    weight = quantize_fp8_torch(tensor(2 * n if silu else n, K))[0]
    scale = torch.rand(len(weight) // 16, K // 32) * 0.01
    x, x_scale = tensor(3, K), None
    if quantized and config.kind == "dot":
        x, x_scale = quantize_fp8_torch(x, group=32)
    arguments = {
        "weight_scale": scale,
        "x_scale": x_scale,
        "out_dtype": torch.float16,
        "groups": groups,
        "silu": silu,
        "residual": tensor(3, n),
    }
    if config.kind == "gemv":
        arguments["norm"] = (tensor(K), 1e-5)
    wanted = skinny_linear_torch(x, weight, **arguments)
    torch.testing.assert_close(skinny_linear(x, weight, config=config, **arguments), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_weights(name):
    config = CONFIGS[name]
    weight, weight_scale = quantize_torch(tensor(40, K), dtype=torch.int8)
    x, x_scale = tensor(3, K), None
    if config.kind == "dot":
        x, x_scale = quantize_torch(x, dtype=torch.int8)
    arguments = {"weight_scale": weight_scale, "x_scale": x_scale, "out_dtype": torch.float16}
    wanted = skinny_linear_torch(x, weight, **arguments)
    torch.testing.assert_close(skinny_linear(x, weight, config=config, **arguments), wanted, atol=2e-2, rtol=2e-2)


def assert_same(got, wanted):
    assert torch.equal(got[1], wanted[1])
    # The interpreter's cast to fp8 is off where rounding carries into the exponent; tests/gpu compares every element.
    assert (got[0].float() == wanted[0].float()).float().mean() > 0.9


@pytest.mark.parametrize("scale", [None, torch.tensor([0.013])])
def test_quantize(scale):
    x = tensor(4, 100) * torch.tensor([[1.0], [1e-2], [30.0], [0.0]]).half()
    assert_same(quantize_fp8(x, scale), quantize_fp8_torch(x, scale))


def test_quantize_groups():
    x = tensor(5, 96) * torch.tensor([[1.0], [1e-2], [30.0], [0.0], [2.0]]).half()
    got, wanted = quantize_fp8(x, group=32), quantize_fp8_torch(x, group=32)
    assert got[1].shape == (5, 3) and got[1].stride() == wanted[1].stride() == (1, 5)
    assert_same(got, wanted)
    x = tensor(3, 2 * 96)
    assert_same(silu_mul_quant(x, group=32), quantize_fp8_torch(silu_mul(x), group=32))


@pytest.mark.parametrize("scale", [None, torch.tensor([0.013])])
def test_quantize_to_int8(scale):
    x = tensor(4, 100) * torch.tensor([[1.0], [1e-2], [30.0], [0.0]]).half()
    got, wanted = quantize_int8(x, scale), quantize_torch(x, scale, dtype=torch.int8)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("add", [False, True])
def test_rms_norm_quant(add):
    x, weight = tensor(3, 96), tensor(96)
    residual = tensor(3, 96) if add else None
    wanted = rms_norm_quant_torch(x, residual, weight, 1e-6)
    got = rms_norm_quant(x, residual, weight, 1e-6)
    assert_same(got, wanted)
    assert torch.equal(got[2], wanted[2])


def test_silu_mul_quant():
    x = tensor(3, 2 * 96)
    got, wanted = silu_mul_quant(x), silu_mul_quant_torch(x.float())
    torch.testing.assert_close(got[1], wanted[1], atol=0, rtol=2e-3)
    assert (got[0].float() == wanted[0].float()).float().mean() > 0.8


def test_a_nan_makes_the_scale_of_its_row_nan():
    """The interpreter casts no NaN to fp8; tests/gpu looks at the elements."""
    x = tensor(3, 40)
    x[1, 7] = float("nan")
    torch.testing.assert_close(quantize_fp8(x)[1], quantize_fp8_torch(x)[1], atol=0, rtol=0, equal_nan=True)
