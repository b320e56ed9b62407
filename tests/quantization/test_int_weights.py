"""Weights rounded to int8 and int4 while loading, on a CPU."""

import pytest
import torch

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.kernels.native import quantized
from quire.models.loading.loader import load_model
from quire.quantization.select import choose_quantization
from tests.models.helpers import CPU, TinyRunner
from tests.quantization.test_fp8_config import compressed
from tests.tiny_models import save_tiny

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_rounding_is_within_half_a_step():
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4, 5] = 40.0
    groups = weight.view(20, 3, 32)
    for type_name, step in (
        ("Q8_0", groups.abs().amax(2) / 127),
        ("Q4_1", (groups.amax(2) - groups.amin(2)) / 15),
    ):
        packed = quantized.quantize(type_name, weight)
        stored = quantized.lookup(torch.arange(20), packed, torch.float32).view(20, 3, 32)
        # Half a step, and what the scale and minimum lose as float16: 2^-11 of each, times q.
        slack = groups.abs().amax(2) * 2**-10 * (1 if type_name == "Q8_0" else 2)
        assert ((stored - groups).abs() <= (step / 2 + slack)[..., None]).all()
        assert torch.equal(stored[3], torch.zeros(3, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_round_like_float32_ones(dtype):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = quantized.quantize("Q8_0", weight.to(dtype).contiguous())
    assert torch.equal(rounded.data, quantized.quantize("Q8_0", weight.float()).data)


@torch.no_grad()
def with_rounded_weights(plain, rounded):
    """The unquantized model, given what the other one's weights stand for."""
    for name, module in plain.named_modules():
        weight = getattr(rounded.get_submodule(name), "block_weight", None)
        if weight is not None:
            numbers = [quantized.lookup(torch.arange(part.outputs), part, torch.float32) for part in weight.parts]
            module.weight.copy_(torch.cat(numbers))
    return plain


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # a tied head; biases and a head of its own
@pytest.mark.parametrize(("requested", "allowed"), [("int8", 0.01), ("int4", 0.2)])
def test_a_tiny_model(tmp_path, family, requested, allowed):
    save_tiny(family, tmp_path)
    ckpt = resolve_model(str(tmp_path))
    hf = load_hf_config(ckpt)
    plain, rounded = (load_model(ckpt, hf, torch.float32, "cpu", quantization=name) for name in (None, requested))
    embedded = plain.embed_tokens(torch.arange(211)), rounded.embed_tokens(torch.arange(211))
    assert off(embedded[1], embedded[0]) < 0.01
    gate_up = plain.layers[2].mlp.up_proj.weight.clone()
    with_rounded_weights(plain, rounded)
    assert off(plain.layers[2].mlp.up_proj.weight, gate_up) < allowed
    wanted, got = (TinyRunner(model, 1).step([(0, TOKENS)])[0] for model in (plain, rounded))
    assert 0 < off(got, wanted) < 0.1  # activations to 8 bits, in a random model that multiplies every error


def test_int4_keeps_embedding_and_head_in_8_bits(tmp_path):
    save_tiny("llama", tmp_path)
    ckpt = resolve_model(str(tmp_path))
    model = load_model(ckpt, load_hf_config(ckpt), torch.bfloat16, "cpu", quantization="int4")
    assert model.embed_tokens.block_weight is model.lm_head.block_weight
    assert [part.format for part in model.lm_head.block_weight.parts] == [quantized.FORMATS["Q8_0"]]
    assert {part.format for part in model.layers[0].mlp.up_proj.block_weight.parts} == {quantized.FORMATS["Q4_1"]}


def test_dummy_weights_are_rounded_too(tmp_path):
    save_tiny("llama", tmp_path)
    ckpt = resolve_model(str(tmp_path), load_format="dummy")
    model = load_model(ckpt, load_hf_config(ckpt), torch.bfloat16, "cpu", quantization="int8")
    assert model.lm_head(torch.ones(2, 64).bfloat16()).isfinite().all()


@pytest.mark.parametrize(
    ("requested", "hf", "dtype", "device", "message"),
    [
        ("int4", {}, torch.float16, "cpu", r"not possible: dtype is float16.*leave it out to run in torch\.float16"),
        (
            "int8",
            {"quantization_config": compressed()},
            torch.bfloat16,
            "cpu",
            "the checkpoint is quantized by 'compressed",
        ),
        ("dequantized", {}, torch.bfloat16, "cpu", "not quantized; allowed: int8, int4, on a GPU also fp8"),
    ],
)
def test_mistakes_are_explained(requested, hf, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        choose_quantization(requested, hf, dtype, torch.device(device))


def test_a_gpu_quantizes_for_its_own_kernels():
    cuda = torch.device("cuda")
    assert choose_quantization("int4", {}, torch.bfloat16, cuda).describe().startswith("int4: weights quantized")
    with pytest.raises(ValueError, match=r"computes in bfloat16 or float16 on a GPU; dtype is torch\.float32"):
        choose_quantization("int8", {}, torch.float32, cuda)


def test_layers_of_odd_sizes_are_named(tmp_path):
    save_tiny("llama", tmp_path, intermediate_size=100)
    ckpt = resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="multiple of 32; one has 100"):
        load_model(ckpt, load_hf_config(ckpt), torch.float32, CPU, quantization="int8")
