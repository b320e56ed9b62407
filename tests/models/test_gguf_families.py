"""Families' GGUF files give the logits of the checkpoint they were made from, and stay quantized where they are."""

import math

import gguf
import numpy as np
import pytest
import torch

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.kernels.native import quantized
from quire.layers.linear_experts import LinearExperts
from quire.models.loading.loader import load_model
from quire.quantization.block_quantized import block_quantized_weights
from tests.gguf_models import write_gguf_of
from tests.models.helpers import CPU, TinyRunner
from tests.tiny_models import LONGROPE, prompts, save_tiny


def transpose(name, tensor, config):
    linears = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return tensor.t() if name.endswith(linears) else tensor


def qkv_together(name, tensor, config):
    if "attn_qkv" not in name:
        return tensor
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    kv_heads = (tensor.shape[0] // head_dim - heads) // 2
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, head_dim, -1)
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, groups.shape[-1]) for part in parts]).reshape(tensor.shape)


def norms_plus_one(name, tensor, config):
    return tensor + 1 if name.endswith("norm.weight") else tensor


def interleave(name, tensor, config):
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape) if heads else tensor


def flat_gate(name, tensor, config):
    return tensor.flatten() if "ffn_gate_inp_shexp" in name else tensor


FFN = {"feed_forward_length": 96}
LAYER_NORM = FFN | {"attention.layer_norm_epsilon": 1e-5}
GQA = {"attention.head_count_kv": 2}
COHERE = LAYER_NORM | GQA | {"logit_scale": 0.25, "rope.freq_base": 10000.0, "rope.scaling.type": "none"}
GLM = FFN | GQA | {"attention.layer_norm_rms_epsilon": 0.00000015625, "rope.dimension_count": 8}
NEOX = LAYER_NORM | {"rope.dimension_count": 4, "use_parallel_residual": True}
RMS_NORM = FFN | GQA | {"attention.layer_norm_rms_epsilon": 1e-6}
GEMMA = RMS_NORM | {"attention.key_length": 32}
GEMMA2 = GEMMA | {"attention.sliding_window": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
GEMMA3 = GEMMA | {"attention.sliding_window": 24, "rope.freq_base": 1e6}
LONG = {name: np.array(LONGROPE[name], np.float32) for name in ("long_factor", "short_factor")}
PHI3 = RMS_NORM | {"attention.layer_norm_rms_epsilon": 1e-5, "rope.scaling.original_context_length": 512}
OLMO = RMS_NORM | {"attention.layer_norm_rms_epsilon": 1e-5}

GRANITE = {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.5, "logit_scale": 0.5}
MIXTURE = RMS_NORM | {"expert_count": 6, "expert_used_count": 2}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
EPS = {"attention.layer_norm_rms_epsilon": 1e-5}
GPT_OSS = MIXTURE | EPS | YARN | {"rope.freq_base": 5000.0, "attention.key_length": 32, "attention.sliding_window": 24}

FILES = {
    "gemma": ("gemma", GEMMA, norms_plus_one),
    "gemma2": ("gemma2", GEMMA2, norms_plus_one),
    "gemma3": ("gemma3", GEMMA3 | {"attention.sliding_window_pattern": 3}, norms_plus_one),
    "phi3": ("phi3", PHI3 | {"rope.dimension_count": 12, "attention.sliding_window": 24}, None),
    "phi3-longrope": (
        "phi3",
        PHI3
        | {
            "rope.scaling.attn_factor": (1 + math.log(4) / math.log(512)) ** 0.5,
            "rope_factors_long.weight": LONG["long_factor"],
            "rope_factors_short.weight": LONG["short_factor"],
        },
        None,
    ),
    "olmo2": ("olmo2", OLMO, None),
    "olmo3": ("olmo2", OLMO | {"rope.freq_base": 500000.0, "attention.sliding_window": 24}, None),
    "granite": ("granite", RMS_NORM | GRANITE, interleave),
    "smollm3": ("smollm3", RMS_NORM | {"rope.freq_base": 2e6}, interleave),
    "gpt2": ("gpt2", LAYER_NORM, transpose),
    "gpt-neox": ("gptneox", NEOX, qkv_together),
    "gpt-neox-sequential": (
        "gptneox",
        NEOX | {"rope.dimension_count": 8, "use_parallel_residual": False},
        qkv_together,
    ),
    "falcon-7b": ("falcon", LAYER_NORM | {"attention.head_count_kv": 1}, qkv_together),
    "falcon-40b": ("falcon", LAYER_NORM | GQA, qkv_together),
    "starcoder2": ("starcoder2", LAYER_NORM | GQA | {"attention.sliding_window": 24}, None),
    "cohere": ("command-r", COHERE | {"rope.freq_base": 500000.0}, None),
    "cohere-qk-norm": ("command-r", COHERE | {"rope.freq_base": 500000.0}, None),
    "cohere2": ("cohere2", COHERE | {"attention.sliding_window": 24}, None),
    "glm": ("chatglm", GLM, None),
    "glm4": ("glm4", GLM, None),
    "mixtral": ("llama", MIXTURE | EPS | {"rope.freq_base": 1e6}, interleave),
    "qwen2-moe": ("qwen2moe", MIXTURE, flat_gate),
    "qwen3-moe": ("qwen3moe", MIXTURE | {"attention.key_length": 32}, None),
    "olmoe": ("olmoe", MIXTURE | EPS | {"attention.clamp_kqv": 0.8}, None),
    "granite-moe": ("granitemoe", GRANITE | MIXTURE | {"expert_used_count": 3}, interleave),
    "gpt-oss": ("gpt-oss", GPT_OSS, None),
}
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "gpt-oss"]


def logits(model):
    (prompt,) = prompts((40,))
    return TinyRunner(model, 1).step([(0, prompt)])[0]


def load(path, quantization=None):
    checkpoint = resolve_model(str(path))
    return load_model(checkpoint, load_hf_config(checkpoint), torch.float32, CPU, quantization=quantization)


@pytest.mark.parametrize("family", FILES)
def test_logits_from_gguf(family, tmp_path):
    reference = save_tiny(family, tmp_path)
    wanted = logits(load(tmp_path))
    architecture, metadata, change = FILES[family]
    path = write_gguf_of(reference, tmp_path / "model.gguf", architecture, metadata, change)
    torch.testing.assert_close(logits(load(path)), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt-neox", "falcon-40b", "cohere-qk-norm", "glm4", "phi3", "smollm3", *MIXTURES]
)
def test_moved_and_fused_rows_stay_quantized(family, tmp_path):
    reference = save_tiny(family, tmp_path)
    architecture, metadata, change = FILES[family]
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf_of(reference, tmp_path / "model.gguf", architecture, metadata, change, kind)
    kept, plain = load(path, "gguf"), load(path, "dequantized")
    for weight in block_quantized_weights(kept):
        assert weight.inputs % 32 or all(isinstance(part, quantized.Packed) for part in weight.parts)
    # Where a router's choice is close, rounded activations make another.
    tolerance = 0.2 if family in MIXTURES else 0.05
    assert (logits(kept) - logits(plain)).abs().mean() < tolerance * logits(plain).abs().mean()


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_stay_quantized(family, tmp_path):
    reference = save_tiny(family, tmp_path)
    architecture, metadata, change = FILES[family]
    kind = gguf.GGMLQuantizationType.Q5_0
    path = write_gguf_of(reference, tmp_path / "model.gguf", architecture, metadata, change, kind)
    kept, plain = load(path, "gguf"), load(path, "dequantized")
    mixtures = [(name, m) for name, m in kept.named_modules() if isinstance(m, LinearExperts)]
    assert mixtures
    for name, experts in mixtures:
        dense = plain.get_submodule(name)
        for layers, wanted in ((experts.gate_up, dense.gate_up), (experts.down, dense.down)):
            for layer, weight in zip(layers, wanted, strict=True):
                parts = layer.block_weight.parts
                rows = [quantized.lookup(torch.arange(part.outputs), part, torch.float32) for part in parts]
                assert torch.equal(torch.cat(rows), weight)
