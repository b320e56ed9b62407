"""LinearMethods of any kind in dense layers, experts and fused layers of several schemes, through the engine."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.layers.linear import MergedColumnParallelLinear
from quire.layers.linear_experts import LinearExperts
from quire.quantization import select
from quire.quantization.block_quantized import BlockQuantizedLinearMethod
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.fp8_dequantized import DequantizedFp8LinearMethod
from quire.quantization.fp8_linear import CheckpointFp8LinearMethod, OnlineFp8LinearMethod
from quire.quantization.mixed import MixedLinearMethod
from quire.quantization.unquantized import UnquantizedLinearMethod
from tests.quantization import scaled_int8
from tests.quantization.scaled_int8 import ScaledInt8LinearMethod
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
THREADS = "tests.executor.threads:ThreadsExecutor"
needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

SCHEMES = {
    "all alike": {},
    "all per tensor": {"per_tensor": ["proj"]},
    "q, k and v differ": {"unquantized": ["k_proj"], "per_tensor": ["v_proj"]},
    "gate and up differ": {"unquantized": ["gate_proj"], "per_tensor": ["down_proj"]},
    "experts differ": {"unquantized": ["experts.1.", "experts.2.up"], "per_tensor": ["experts.3.gate"]},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(select, "_registered", {})
    scaled_int8.register()


def generated(folder, **options):
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, kv_cache_memory_bytes=1 << 22, **options)
    try:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    finally:
        llm.shutdown()
    return [list(one.outputs[0].token_ids) for one in found]


def write_checkpoints(family, scheme, folder):
    """A quantized checkpoint, and one of the same weights unquantized."""
    ours, plain = folder / "quantized", folder / "unquantized"
    save_tiny(family, ours)
    quantization = scaled_int8.ScaledInt8(scheme, torch.float32, CPU)
    stored, unquantized = {}, load_file(ours / "model.safetensors")
    for name, data in list(unquantized.items()):
        layer = name.removesuffix(".weight")
        method = quantization.linear_method(layer) if layer.endswith("_proj") else None
        if method is None:
            stored[name] = data
            continue
        scale = data.abs().amax(1) / 127 if method.per_output else data.abs().amax().view(1) / 127
        codes = (data / scale[:, None]).round()
        stored[f"{layer}.qweight"], stored[f"{layer}.qscale"] = codes.to(torch.int8), scale
        unquantized[name] = codes * scale[:, None]
    plain.mkdir()
    config = json.loads((ours / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": scaled_int8.NAME, **scheme}
    (ours / "config.json").write_text(json.dumps(config))
    save_file(stored, ours / "model.safetensors")
    save_file(unquantized, plain / "model.safetensors")
    return ours, plain


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_registered_method_serves_linears_and_experts(tmp_path, family, scheme):
    ours, plain = write_checkpoints(family, scheme, tmp_path)
    assert generated(ours, dtype="float32") == generated(plain, dtype="float32")


@needs_c
def test_ranks_share_a_vocabulary_in_8_bits(tmp_path):
    save_tiny("llama", tmp_path, intermediate_size=128)  # of which each rank has whole groups of 32
    options = {"dtype": "float32", "quantization": "int8"}
    assert generated(tmp_path, distributed_executor_backend=THREADS, **options) == generated(tmp_path, **options)


def test_ranks_share_a_quantized_model(tmp_path):
    scheme = SCHEMES["q, k and v differ"] | {"per_tensor": ["v_proj", "experts.3.gate"]}
    ours, plain = write_checkpoints("qwen3-moe", scheme, tmp_path)
    found = generated(ours, dtype="float32", distributed_executor_backend=THREADS)
    assert found == generated(plain, dtype="float32")


@needs_c
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.03), ("int8_per_channel", 0.03), ("int4", 0.25)])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_are_quantized_while_loading(tmp_path, family, quantization, limit):
    from quire.checkpoint.config import load_hf_config
    from quire.checkpoint.resolve import resolve_model
    from quire.models.loading.loader import load_model

    save_tiny(family, tmp_path)
    ckpt = resolve_model(str(tmp_path))
    x = torch.randn(9, 64)
    blocks = []
    for chosen in (None, quantization):
        model = load_model(ckpt, load_hf_config(ckpt), torch.float32, CPU, quantization=chosen)
        blocks.append(model.layers[0].mlp)
    assert isinstance(blocks[1].experts, LinearExperts)
    logits = blocks[0].router(x)
    wanted, found = (block.experts(x, logits) for block in blocks)
    # 32 normal numbers span about 4.6 of their deviations, so rounding one to 8 bits is off by 0.5 %, to 4 bits
    # by 9 %. Weights are rounded in three products and activations in two, of which the second has longer tails.
    assert 0 < float((found - wanted).norm() / wanted.norm()) < limit
    assert all(len(ids) == 12 for ids in generated(tmp_path, quantization=quantization))


def test_experts_in_one_tensor_are_not_quantized_yet(tmp_path):
    save_tiny("granite-moe", tmp_path)
    config = {"quantization_config": {"quant_method": scaled_int8.NAME}}
    with pytest.raises(ValueError, match="stores in one tensor cannot be quantized yet"):
        generated(tmp_path, hf_overrides=config)


def test_some_of_a_fused_layer_in_fp8(tmp_path):
    """An fp8 checkpoint that leaves v_proj and up_proj as they were."""
    ours, plain = tmp_path / "fp8", tmp_path / "plain"
    model = save_tiny("llama", ours)
    stored, unquantized = load_file(ours / "model.safetensors"), {}
    for name, data in list(stored.items()):
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and not layer.endswith(("v_proj", "up_proj")):
            scale = data.abs().amax() / 448
            stored[name] = (data / scale).to(torch.float8_e4m3fn)
            stored[f"{layer}.weight_scale"] = scale
            unquantized[name] = stored[name].float() * scale
    config = json.loads((ours / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "ignored_layers": ["v_proj", "up_proj"]}
    (ours / "config.json").write_text(json.dumps(config))
    save_file(stored, ours / "model.safetensors")
    model.load_state_dict(unquantized, strict=False)
    model.save_pretrained(plain)
    assert generated(ours, dtype="float32") == generated(plain, dtype="float32")
    assert generated(ours, dtype="bfloat16")  # where weights are packed


METHODS = {
    "unquantized": UnquantizedLinearMethod(),
    "online fp8": OnlineFp8LinearMethod(per_channel=True),
    "fp8": CheckpointFp8LinearMethod(Fp8Scheme(per_channel=True)),
    "dequantized fp8": DequantizedFp8LinearMethod(Fp8Scheme(per_channel=True)),
    "block": pytest.param(BlockQuantizedLinearMethod("Q8_0"), marks=needs_c),
    "made up": ScaledInt8LinearMethod(per_output=True),
    "mixed": MixedLinearMethod((UnquantizedLinearMethod(), OnlineFp8LinearMethod(per_channel=True))),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_one_method_serves_many_layers(method):
    """It is a value without state: two layers that are loaded at the same time do not disturb each other."""
    before = hash(method)
    layers = [MergedColumnParallelLinear(64, [32, 48], True, torch.float32, CPU, method=method) for _ in range(2)]
    slots = [layer.load_slots() for layer in layers]
    for key in slots[0]:
        for factor, each in zip((1, -1), slots, strict=True):
            with each[key].opened() as view:
                generator = torch.Generator().manual_seed(len(key[0]))
                numbers = torch.randint(1, 5, view.shape, generator=generator).float()
                view.copy_(numbers if "scale" in key[0] else numbers * factor)
    for layer in layers:
        layer.process_after_loading()
    x = torch.randn(5, 64)
    first, second = (layer(x) for layer in layers)
    assert first.shape == (5, 80) and first.abs().max() > 1
    torch.testing.assert_close(first, -second)
    assert vars(method) == {name: vars(method)[name] for name in method.__dataclass_fields__} and hash(method) == before
