import pytest
import torch

from quire.config import EngineConfig
from quire.quantization.compressed_int import CompressedScheme
from quire.quantization.compressed_tensors import CompressedConfig
from quire.quantization.fp8 import Fp8Checkpoint
from quire.quantization.fp8_config import Fp8Config, Fp8Scheme, parse_fp8_config
from quire.quantization.mixed import MixedLinearMethod, fused_method
from quire.quantization.select import choose_quantization
from quire.quantization.unquantized import UNQUANTIZED
from tests.quantization.fp8_checkpoints import block_fp8, modelopt_fp8

CPU = torch.device("cpu")


def compressed(weights: str = "channel", inputs: str = "token", dynamic: bool = True, **differences) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": weights, "dynamic": False, "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": inputs, "dynamic": dynamic},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | differences


def test_fp8():
    config = parse_fp8_config({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    assert config.scheme == Fp8Scheme(activations="static")
    config = parse_fp8_config({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"})
    assert config.scheme == Fp8Scheme(block=(128, 128), scale_name="weight_scale_inv")


def scheme_of(stored: dict, name: str = "model.layers.0.mlp.up_proj") -> object:
    return CompressedConfig.parse(stored).scheme(name)


def test_compressed_tensors():
    assert scheme_of(compressed()) == Fp8Scheme(per_channel=True)
    assert scheme_of(compressed("tensor", "tensor", dynamic=False)) == Fp8Scheme(activations="static")
    assert scheme_of(compressed(), "lm_head") is None
    blocks = compressed("block", "group")
    blocks["config_groups"]["group_0"]["weights"]["block_structure"] = [128, 64]
    assert scheme_of(blocks) == Fp8Scheme(block=(128, 64))
    blocks["config_groups"]["group_0"] |= {"input_activations": None}
    blocks["config_groups"]["group_0"]["weights"]["block_structure"] = "64x128"
    assert scheme_of(blocks) == Fp8Scheme(block=(64, 128), activations="none")


def test_integers_and_fp8_in_one_checkpoint():
    integers = {
        "format": "pack-quantized",
        "targets": [r"re:.*mlp\..*"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }
    stored = compressed(format="mixed-precision")
    stored["config_groups"]["group_0"]["format"] = "float-quantized"
    stored["config_groups"]["mlp"] = integers
    assert scheme_of(stored) == CompressedScheme(4, 32, packed=True, symmetric=True)
    assert scheme_of(stored, "model.layers.0.self_attn.q_proj") == Fp8Scheme(per_channel=True)
    stored["config_groups"]["mlp"]["weights"]["strategy"] = "rows"
    with pytest.raises(ValueError, match=r"weights by rows.*supported: tensor, channel, group \(config_groups: mlp\)"):
        scheme_of(stored)


def test_modelopt():
    stored = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*.layers.1.*", "model.layers.2.mlp"],
    }
    found = choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, CPU)
    assert isinstance(found, Fp8Checkpoint) and found.config.scheme == Fp8Scheme(activations="static")
    quantized = [found.config.quantizes(f"model.layers.{i}.mlp.up_proj") for i in (0, 1, 2, 11, 12)]
    assert quantized == [True, False, False, True, True]
    stored["quant_algo"] = "W4A8_AWQ"
    with pytest.raises(ValueError, match=r"quant_algo 'W4A8_AWQ'.*supported: FP8"):
        choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, CPU)


def test_skipped_layers():
    by_name = Fp8Config(skipped=("model.layers.0.mlp.down_proj", r"re:.*\.layers\.1\..*"))
    assert not by_name.quantizes("model.layers.0.mlp.down_proj")
    assert by_name.quantizes("model.layers.2.mlp.down_proj")
    assert not by_name.quantizes("model.layers.1.self_attn.q_proj")
    by_part = Fp8Config(skipped=("mlp", "model.layers.1"), skip_by_part=True)
    assert not by_part.quantizes("model.layers.0.mlp.down_proj")
    assert not by_part.quantizes("model.layers.1.self_attn.o_proj")
    assert by_part.quantizes("model.layers.10.self_attn.o_proj")


def test_members_of_a_fused_layer_may_differ():
    quantization = Fp8Checkpoint(Fp8Config(skipped=("model.layers.0.mlp.up_proj",)), torch.bfloat16, CPU)
    methods = [quantization.linear_method(f"model.layers.{i}.mlp.{n}_proj") for i in (0, 1) for n in ("gate", "up")]
    assert methods[1] is None and methods[2] == methods[3] == methods[0]
    assert isinstance(fused_method(methods[:2]), MixedLinearMethod)
    assert fused_method(methods[2:]) == methods[0] and fused_method([None, None]) is None


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "supported: dynamic, static"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "supported: e4m3"),
        (compressed(format="pack-quantized"), "supported: float-quantized"),
        (compressed(weights="group"), "supported: channel, tensor"),
        (compressed(inputs="tensor"), "supported: dynamic by token"),
        (compressed(config_groups={}), "one group"),
        (compressed(weights="block", inputs="group"), r"block with block_structure \(config_groups: group_0\)"),
        (compressed(weights="block", inputs="tensor", dynamic=False), "block_structure"),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]; it must be a name"),
        ({"quant_method": "torchao"}, "'torchao'.*supported: fp8, compressed-tensors, gptq, awq, mxfp4, modelopt"),
    ],
)
def test_what_is_not_supported_says_what_is(stored, complaint):
    with pytest.raises(ValueError, match=complaint):
        choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, CPU)


def test_choices():
    assert choose_quantization(None, {}, torch.bfloat16, CPU) is UNQUANTIZED
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.9.*a CPU has no fp8"):
        choose_quantization("fp8", {}, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="the checkpoint is not quantized; allowed: int8, int4, on a GPU also fp8"):
        choose_quantization("compressed-tensors", {}, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="is quantized by 'compressed-tensors'; leave it out"):
        choose_quantization("fp8", {"quantization_config": compressed()}, torch.bfloat16, CPU)
    assert "dequantized to bfloat16" in (
        choose_quantization(None, {"quantization_config": compressed()}, torch.bfloat16, CPU).describe()
    )
    for method, config in (("fp8", block_fp8().config), ("modelopt", modelopt_fp8().config)):
        chosen = choose_quantization(None, {"quantization_config": config}, torch.bfloat16, CPU)
        assert chosen.describe().startswith(f"{method}: fp8 weights dequantized to bfloat16 while loading (a CPU has")


def test_the_option():
    assert EngineConfig.from_kwargs(quantization="fp8").model.quantization == "fp8"
    assert EngineConfig.from_kwargs(quantization="awq_marlin").model.quantization == "awq"
    with pytest.raises(ValueError, match="allowed: fp8, fp8_per_tensor, compressed-tensors"):
        EngineConfig.from_kwargs(quantization="torchao")
