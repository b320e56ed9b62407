"""W8A8 in int8 as a GPU multiplies it, by the torch versions of its kernels; tests/gpu has the kernels."""

import pytest
import torch

from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import TensorParallel
from quire.quantization import select
from quire.quantization.compressed_int import CompressedScheme
from quire.quantization.compressed_tensors import CompressedConfig
from quire.quantization.int8_triton import W8A8Kernel
from quire.quantization.int_linear import IntLinearMethod
from tests.quantization import rounded_inputs
from tests.quantization.int_checkpoints import plain_tensors, quantize, w8a8
from tests.quantization.rounded_inputs import round_to_int8
from tests.quantization.test_int_checkpoints import checkpoints, generated
from tests.quantization.test_int_layers import fill

CPU = torch.device("cpu")
SCALE = 0.02
SCHEMES = {
    "dynamic": CompressedScheme(8, -1, packed=False, symmetric=True, int8_inputs=True),
    "static": CompressedScheme(8, -1, packed=False, symmetric=True, int8_inputs=True, static_inputs=True),
    "per tensor": CompressedScheme(8, -1, packed=False, symmetric=True, int8_inputs=True, per_tensor=True),
}


def written(scheme, outputs, inputs):
    q = quantize(torch.randn(outputs, inputs), 8, -1)
    if scheme.per_tensor:
        q.scales[:] = q.scales.max()
    tensors = plain_tensors(q, 8, True)
    if scheme.per_tensor:
        tensors["weight_scale"] = q.scales[:1, 0]
    return tensors | ({"input_scale": torch.tensor([SCALE])} if scheme.static_inputs else {}), q.dequantized()


def rounded(x, scheme):
    return round_to_int8(x, SCALE if scheme.static_inputs else None)


@pytest.mark.parametrize("name", SCHEMES)
def test_members_of_a_fused_layer(name):
    scheme = SCHEMES[name]
    method = IntLinearMethod(scheme, W8A8Kernel(torch.float32))
    layer = MergedColumnParallelLinear(256, [48, 32], True, torch.float32, CPU, method=method)
    (gate, gate_weight), (up, up_weight) = (written(scheme, n, 256) for n in (48, 32))
    bias = torch.randn(80)
    fill(layer, {0: gate | {"bias": bias[:48]}, 1: up | {"bias": bias[48:]}})
    assert layer.weight.dtype is torch.int8 and layer.weight_scale.shape == (80,)
    x = torch.randn(9, 256)
    wanted = rounded(x, scheme) @ torch.cat((gate_weight, up_weight)).T + bias
    torch.testing.assert_close(layer(x), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_of_inputs_that_cannot_be_meant(scale):
    scheme = next(scheme for scheme in SCHEMES.values() if scheme.static_inputs)
    method = IntLinearMethod(scheme, W8A8Kernel(torch.float32), "model.layers.0.mlp.down_proj")
    layer = ColumnParallelLinear(256, 48, False, torch.float32, CPU, method=method)
    with pytest.raises(ValueError, match=r"mlp\.down_proj: its input_scale is \[.*\]; allowed: positive numbers"):
        fill(layer, {None: written(scheme, 48, 256)[0] | {"input_scale": torch.tensor([scale])}})


@pytest.mark.parametrize("name", SCHEMES)
def test_two_ranks_summed_by_hand(name):
    scheme = SCHEMES[name]
    tensors, weight = written(scheme, 48, 256)
    x, found, columns, parts = torch.randn(7, 256), 0, [], []
    for rank in range(2):
        placed = (torch.float32, CPU, TensorParallel(rank, 2), IntLinearMethod(scheme, W8A8Kernel(torch.float32)))
        row, column = RowParallelLinear(256, 48, False, *placed), ColumnParallelLinear(256, 48, False, *placed)
        fill(row, {None: tensors})
        fill(column, {None: tensors})
        part = x[:, 128 * rank :][:, :128].contiguous()
        parts.append(rounded(part, scheme))
        found = found + row.method.apply(row, part, None)
        columns.append(column(x))
    torch.testing.assert_close(found, torch.cat(parts, 1) @ weight.T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(torch.cat(columns, 1), rounded(x, scheme) @ weight.T, atol=1e-3, rtol=1e-4)


def test_inputs_that_do_not_fit_are_multiplied_as_before():
    """Kernels read 16 bytes at a time."""
    scheme = SCHEMES["dynamic"]
    layer = ColumnParallelLinear(
        72, 48, False, torch.bfloat16, CPU, method=IntLinearMethod(scheme, W8A8Kernel(torch.bfloat16))
    )
    tensors, weight = written(scheme, 48, 72)
    fill(layer, {None: tensors})
    x = torch.randn(5, 72).bfloat16()
    torch.testing.assert_close(layer(x).float(), x.float() @ weight.T, atol=0.1, rtol=0.02)


def test_schemes():
    def scheme(made):
        return CompressedConfig.parse(made.config).scheme("model.layers.0.mlp.up_proj")

    assert scheme(w8a8()) == SCHEMES["dynamic"] and scheme(w8a8(static=True)) == SCHEMES["static"]
    assert not scheme(w8a8(sym=False)).int8_inputs


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3-moe"])
def test_through_the_engine(tmp_path, monkeypatch, family, static):
    """As the unquantized checkpoint with activations rounded alike; experts' are not rounded."""
    monkeypatch.setattr(select, "_registered", {})
    rounded_inputs.register()
    ours, plain = checkpoints(tmp_path, family, w8a8(static=static))

    def choose(dtype, device, dequantize, int8_inputs=False, **_):
        return W8A8Kernel(dtype) if int8_inputs else chosen(dtype, device, True)

    from quire.quantization import compressed_tensors

    chosen = compressed_tensors.choose_int_kernel
    monkeypatch.setattr(compressed_tensors, "choose_int_kernel", choose)
    found = generated(ours)
    stored = {"int8": {"scale": SCALE} if static else {}, "skipped": [".experts."]}
    config = {"quantization_config": {"quant_method": rounded_inputs.NAME, **stored}}
    wanted = generated(plain, hf_overrides=config)
    off = (found.prompt_logprobs - wanted.prompt_logprobs).abs()
    by_rounding = (generated(plain).prompt_logprobs - wanted.prompt_logprobs).abs()
    assert (off[-29:] < 1e-4).float().mean() > 0.75 and off.mean() < 0.5 * by_rounding.mean()
