"""fp8 checkpoints with every layout of scales: through the engine, layer by layer, and shared by two ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.moe_routing import Routing
from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.linear_experts import LinearExperts
from quire.layers.parallel import TensorParallel
from quire.quantization import select
from quire.quantization.fp8_blocks import GroupedFp8LinearMethod
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.fp8_dequantized import DequantizedFp8LinearMethod
from quire.quantization.fp8_linear import CheckpointFp8LinearMethod
from tests.quantization import rounded_inputs
from tests.quantization.fp8_checkpoints import INPUT_SCALE, block_fp8, compressed_fp8, modelopt_fp8, quantize
from tests.quantization.int_checkpoints import Format, group, save_checkpoints, w4a16
from tests.quantization.rounded_inputs import round_to_fp8
from tests.quantization.test_int_checkpoints import assert_same, generated
from tests.quantization.test_int_layers import fill

CPU = torch.device("cpu")
TOKEN, STATIC = {"group": None}, {"group": None, "scale": INPUT_SCALE}
# A format, and how a GPU rounds activations.
FORMATS = {
    "tensor": (compressed_fp8("tensor"), TOKEN),
    "tensor, static": (compressed_fp8("tensor", "tensor"), STATIC),
    "channel": (compressed_fp8("channel"), TOKEN),
    "channel, static": (compressed_fp8("channel", "tensor"), STATIC),
    "block": (block_fp8(), {"group": 32}),
    "block of 64x32": (block_fp8((64, 32)), {"group": 32}),
    "compressed block": (compressed_fp8((16, 32), "group"), {"group": 32}),
    "modelopt": (modelopt_fp8(), STATIC),
    "W8A16": (compressed_fp8("channel", None), None),
    "W8A16 block": (compressed_fp8((32, 32), None), None),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(select, "_registered", {})
    rounded_inputs.register()


def checkpoints(folder, family, made, **overrides):
    write = made.write
    kept = Format(made.config, lambda name, w: None if name == "lm_head" else write(name, w))
    return save_checkpoints(family, folder, kept, **overrides)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_on_the_cpu(tmp_path, name):
    ours, plain = checkpoints(tmp_path, "llama", FORMATS[name][0])
    assert_same(generated(ours), generated(plain))


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "channel"), ("gemma3", "block"), ("gemma3", "modelopt"), ("mixtral", "channel"), ("qwen3-moe", "block")],
)
def test_families(tmp_path, family, name):
    ours, plain = checkpoints(tmp_path, family, FORMATS[name][0])
    assert_same(generated(ours), generated(plain))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("name", FORMATS)
def test_in_fp8_by_the_twins(tmp_path, monkeypatch, family, name):
    """A GPU's path in float32: as the unquantized checkpoint with activations rounded alike, or not rounded."""
    made, rounding = FORMATS[name]
    ours, plain = checkpoints(tmp_path, family, made)
    monkeypatch.setattr("quire.quantization.fp8.computes_in_fp8", lambda *_: True)
    found = generated(ours)
    if rounding is None:
        assert_same(found, generated(plain))
        return
    config = {"quantization_config": {"quant_method": rounded_inputs.NAME, "fp8": rounding}}
    wanted = generated(plain, hf_overrides=config)
    # Seldom, sums in another order move a number to the next of fp8, which later tokens then see.
    off = (found.prompt_logprobs - wanted.prompt_logprobs).abs()
    by_rounding = (generated(plain).prompt_logprobs - wanted.prompt_logprobs).abs()
    assert (off[-29:] < 1e-4).float().mean() > 0.75 and off.mean() < 0.5 * by_rounding.mean()


def test_integers_and_fp8_in_one_checkpoint(tmp_path):
    """v_proj and up_proj, members of fused layers, are of 4 bits; the rest is fp8."""
    in_fp8, integers = compressed_fp8("channel"), w4a16()
    groups = in_fp8.config["config_groups"] | {
        "integers": group(targets=[r"re:.*\.(v|up)_proj"], format="pack-quantized")
    }

    def write(name, weight):
        return (integers if name.endswith((".v_proj", ".up_proj")) else in_fp8).write(name, weight)

    ours, plain = checkpoints(tmp_path, "llama", Format(in_fp8.config | {"config_groups": groups}, write))
    assert_same(generated(ours, quantization="dequantized"), generated(plain))


def test_modelopts_own_file(tmp_path):
    ours, plain = checkpoints(tmp_path, "llama", modelopt_fp8())
    config = json.loads((ours / "config.json").read_text())
    stored = config.pop("quantization_config")
    del stored["quant_method"]
    (ours / "config.json").write_text(json.dumps(config))
    (ours / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stored}))
    assert_same(generated(ours), generated(plain))


SCHEMES = {
    "tensor": ("tensor", Fp8Scheme()),
    "channel": ("channel", Fp8Scheme(per_channel=True)),
    "block": ((64, 64), Fp8Scheme(block=(64, 64))),
    "block of 128x32": ((128, 32), Fp8Scheme(block=(128, 32))),
    "W8A16": ("channel", Fp8Scheme(per_channel=True, activations="none")),
    "W8A16 block": ((64, 64), Fp8Scheme(block=(64, 64), activations="none")),
}


def written(layout, outputs, inputs):
    q, scales, meant = quantize(torch.randn(outputs, inputs), layout)
    return {"weight": q, "weight_scale": scales}, meant


def method_of(scheme):
    grouped = scheme.block is not None or scheme.activations == "none"
    return (GroupedFp8LinearMethod if grouped else CheckpointFp8LinearMethod)(scheme)


def rounded(x, scheme):
    if scheme.activations == "none":
        return x
    return round_to_fp8(x, None if scheme.block is None else scheme.block[1])


@pytest.mark.parametrize("name", SCHEMES)
def test_members_of_a_fused_layer(name):
    """Blocks need not divide a member's outputs: scales are then shared by fewer of them."""
    layout, scheme = SCHEMES[name]
    layer = MergedColumnParallelLinear(256, [96, 32], True, torch.float32, CPU, method=method_of(scheme))
    (gate, gate_weight), (up, up_weight) = (written(layout, n, 256) for n in (96, 32))
    bias = torch.randn(128)
    fill(layer, {0: gate | {"bias": bias[:96]}, 1: up | {"bias": bias[96:]}})
    x = torch.randn(9, 256)
    wanted = rounded(x, scheme) @ torch.cat((gate_weight, up_weight)).T + bias
    torch.testing.assert_close(layer(x), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_two_ranks_summed_by_hand(name):
    layout, scheme = SCHEMES[name]
    tensors, weight = written(layout, 128, 256)
    x, found, columns, parts = torch.randn(7, 256), 0, [], []
    for rank in range(2):
        placed = (torch.float32, CPU, TensorParallel(rank, 2), method_of(scheme))
        row, column = RowParallelLinear(256, 128, False, *placed), ColumnParallelLinear(256, 128, False, *placed)
        fill(row, {None: tensors})
        fill(column, {None: tensors})
        part = x[:, 128 * rank :][:, :128].contiguous()
        parts.append(rounded(part, scheme))
        found = found + row.method.apply(row, part, None)
        columns.append(column(x))
    torch.testing.assert_close(found, torch.cat(parts, 1) @ weight.T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(torch.cat(columns, 1), rounded(x, scheme) @ weight.T, atol=1e-3, rtol=1e-4)


def test_blocks_too_small_for_a_part_are_named():
    method = GroupedFp8LinearMethod(Fp8Scheme(block=(64, 64)), "model.layers.0.mlp.down_proj")
    layer = RowParallelLinear(96, 64, False, torch.float32, CPU, TensorParallel(1, 2), method)
    with pytest.raises(ValueError, match=r"mlp\.down_proj: .*64 outputs and 16 inputs.*allowed: at least 16 and 32"):
        fill(layer, {None: written((64, 64), 64, 96)[0]})


def test_a_scale_of_several_members_may_have_more_dimensions(tmp_path):
    ours, _ = checkpoints(tmp_path, "phi3", modelopt_fp8(), intermediate_size=128)
    wanted, tensors = generated(ours), load_file(ours / "model.safetensors")
    wider = {name: tensor.view(1, 1) for name, tensor in tensors.items() if name.endswith("_scale")}
    save_file(tensors | wider, ours / "model.safetensors")
    assert wider
    assert_same(generated(ours), wanted)


@pytest.mark.parametrize("method", [CheckpointFp8LinearMethod, DequantizedFp8LinearMethod])
@pytest.mark.parametrize(
    ("name", "scale"),
    [("weight_scale", torch.nan), ("weight_scale", torch.inf), ("input_scale", 0.0), ("input_scale", -1)],
)
def test_scales_that_cannot_be_meant_are_named(method, name, scale):
    layer = ColumnParallelLinear(
        64, 32, False, torch.float32, CPU, method=method(Fp8Scheme(activations="static"), "up")
    )
    tensors = written("tensor", 32, 64)[0] | {"input_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=f"up: its {name} "):
        fill(layer, {None: tensors | {name: torch.tensor([float(scale)])}})


def test_scales_of_inputs_of_experts_are_not_used():
    """Those that no text of the calibration has reached have zeros."""
    method = CheckpointFp8LinearMethod(Fp8Scheme(activations="static"), "model.layers.0.mlp.experts.3.up_proj")
    layer = ColumnParallelLinear(64, 32, False, torch.float32, CPU, method=method)
    fill(layer, {None: written("tensor", 32, 64)[0] | {"input_scale": torch.zeros(1)}})


def test_experts_that_differ_in_their_inputs_are_not_one_weight():
    def experts(*activations):
        methods = [method_of(Fp8Scheme(per_channel=True, activations=each)) for each in activations]
        made = LinearExperts(2, Routing(1), 64, 32, torch.float32, CPU, [(method, method) for method in methods])
        for layer in made.gate_up:
            fill(layer, {shard: written("channel", 32, 64)[0] for shard in (0, 1)})
        for layer in made.down:
            fill(layer, {None: written("channel", 64, 32)[0]})
        return made._stacked_fp8()

    assert experts("dynamic", "dynamic").quantizes and not experts("none", "none").quantizes
    assert experts("dynamic", "none") is None
