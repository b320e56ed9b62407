"""Weights in int8 with a scale per output, activations in int8 by token and group of inputs, on a CPU."""

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.kernels.native.build import library
from quire.kernels.native.int8 import int8_linear, int8_linear_reference, pack_int8, quantize_channels
from quire.layers.linear import MergedColumnParallelLinear
from quire.quantization.int8_channel import Int8ChannelLinearMethod
from quire.quantization.select import choose_quantization
from tests.quantization import int_checkpoints
from tests.tiny_models import prompts, save_tiny

CPU = torch.device("cpu")
SHAPES = [(1, 64, 64), (2, 1, 1), (5, 33, 7), (13, 70, 50), (64, 96, 576), (100, 40, 1536)]  # rows, outputs, inputs
needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_a_weight_moves_by_at_most_half_a_step():
    weight = torch.randn(5, 100)
    weight[1] = 0
    codes, scales = quantize_channels(weight)
    assert ((codes * scales[:, None] - weight).abs() <= 0.501 * weight.abs().amax(1, keepdim=True) / 127).all()
    assert codes.abs().amax(1).tolist() == [127, 0, 127, 127, 127]


@needs_c
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_products_equal_the_reference(rows, outputs, inputs, dtype, biased):
    codes, scales = quantize_channels(torch.randn(outputs, inputs))
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype) if biased else None
    x[0] *= 1e-20
    assert torch.equal(int8_linear(x, pack_int8(codes, scales), bias), int8_linear_reference(x, codes, scales, bias))


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    weight = pack_int8(*quantize_channels(torch.randn(100, 300)))
    x = torch.randn(200, 300).to(dtype)
    whole = int8_linear(x, weight, None)
    for rows in (1, 2, 11, 12, 13, 64):
        assert torch.equal(int8_linear(x[7 : 7 + rows], weight, None), whole[7 : 7 + rows])


@needs_c
def test_rows_without_numbers():
    weight = pack_int8(*quantize_channels(torch.randn(40, 64)))
    x = torch.randn(3, 64)
    x[0], x[1, 5] = 0, float("nan")
    found = int8_linear(x, weight, torch.ones(40))
    assert (found[0] == 1).all() and found[1].isnan().all() and found[2].isfinite().all()


@needs_c
@pytest.mark.parametrize("flag", ["-march=haswell", "-march=x86-64"])
def test_lesser_processors_give_the_same_bits(flag, monkeypatch):
    lesser = library(flag, only=("int8_linear.c", "linear.c", "threads.c"))
    if lesser is None:
        pytest.skip("the compiler does not know this processor")
    weight = pack_int8(*quantize_channels(torch.randn(70, 50)))
    for dtype in (torch.float32, torch.bfloat16):
        x, bias = torch.randn(14, 50).to(dtype), torch.randn(70).to(dtype)
        wanted = int8_linear(x, weight, bias)
        function = lesser["quire_int8_linear"]
        function.argtypes = native.bound("quire_int8_linear").argtypes
        with monkeypatch.context() as patched:
            patched.setattr("quire.kernels.native.int8.native_function", {"quire_int8_linear": function}.get)
            assert torch.equal(int8_linear(x, weight, bias), wanted)


@needs_c
def test_a_layer():
    method = Int8ChannelLinearMethod()
    layer = MergedColumnParallelLinear(100, [64, 32], True, torch.bfloat16, CPU, method=method)
    weight = torch.randn(96, 100, dtype=torch.bfloat16)
    for (name, shard), slot in layer.load_slots().items():
        with slot.opened() as view:
            view.copy_(weight.split([64, 32])[shard] if name == "weight" else torch.ones_like(view))
    layer.process_after_loading()
    x = torch.randn(7, 100, dtype=torch.bfloat16)
    wanted = x.float() @ weight.float().T + 1
    assert (layer(x).float() - wanted).norm() / wanted.norm() < 0.015


@needs_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model(tmp_path, dtype):
    save_tiny("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options):
        with LLM(str(tmp_path), skip_tokenizer_init=True, dtype=dtype, max_model_len=176, **options) as llm:
            outputs = llm.generate(prompts()[:4], params, use_tqdm=False)
        return torch.tensor([next(iter(p.values())).logprob for o in outputs for p in o.prompt_logprobs[1:]])

    moved = (logprobs(quantization="int8_per_channel") - logprobs()).abs()
    assert 0 < moved.max() < 0.2


def test_a_gpu_is_refused():
    with pytest.raises(
        ValueError, match="is for CPUs, and not possible here: the device is a GPU; allowed on a GPU: int8"
    ):
        choose_quantization("int8_per_channel", {}, torch.bfloat16, torch.device("cuda"))


def test_quantized_checkpoints_are_refused():
    config = {"quantization_config": int_checkpoints.w8a8().config}
    with pytest.raises(ValueError, match="'int8_per_channel', but the checkpoint is quantized by 'compressed-tensors'"):
        choose_quantization("int8_per_channel", config, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="'int8_per_channel', but the checkpoint is a GGUF"):
        choose_quantization("int8_per_channel", {}, torch.bfloat16, CPU, is_gguf=True)


@needs_c
def test_float16_is_refused():
    with pytest.raises(ValueError, match="dtype is float16"):
        choose_quantization("int8_per_channel", {}, torch.float16, CPU)
