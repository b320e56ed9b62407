"""A config.json may hold anything: a size that makes no sense is an error that names it, never a crash in a kernel."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from quire.checkpoint.resolve import Checkpoint
from quire.config.values import finite_number, whole_number
from quire.kernels import native
from quire.kernels.native import quantized
from quire.layers.attention import Attention
from quire.models.loading.loader import load_model
from quire.models.registry import model_class
from quire.models.transformers import library
from quire.quantization.select import choose_quantization
from tests.models.references import LLAMA3_ROPE, LONGROPE, SMALL, YARN_ROPE

needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def read(architecture: str = "LlamaForCausalLM", **changes: Any):
    return model_class({"architectures": [architecture]}).read_config(SMALL | changes)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [0, -8, 10**12, 16.0, True, "16", [16], float("inf")])
def test_sizes_are_positive_whole_numbers_within_bounds(key, value):
    with pytest.raises(ValueError, match=f"^{key} is .*; it must be a whole number from 1 to "):
        read(**{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 4000}, "partial_rotary_factor is 4000; it must be a finite number above 0"),
        ({"partial_rotary_factor": 8}, "partial_rotary_factor is 8"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor is -0.5"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan"),
        ({"partial_rotary_factor": 0.01}, "leaves nothing to rotate of a head of 8"),
        ({"head_dim": 7}, "8 elements of each head are rotated, but head_dim is 7"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 6, which num_key_value_heads, 4, does not divide"),
        ({"num_key_value_heads": 12}, "num_key_value_heads, 12, does not divide"),
        ({"rms_norm_eps": float("inf")}, "the epsilon of norms"),
        ({"rms_norm_eps": -1.0}, "the epsilon of norms"),
        ({"rms_norm_eps": "small"}, "the epsilon of norms"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope type \['linear'\] is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor of the rope parameters is -2"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor of the rope parameters is nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e6}}, "stretched by its rope parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "2"}}, "factor of the rope parameters is '2'"),
        ({"rope_scaling": YARN_ROPE | {"original_max_position_embeddings": 0.5}}, "original_max_.* is 0.5"),
        ({"rope_scaling": YARN_ROPE | {"attention_factor": 0}}, "attention_factor of the rope parameters is 0"),
        ({"rope_scaling": YARN_ROPE | {"beta_fast": -1}}, "beta_fast of the rope parameters is -1"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "the second must be greater"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5}}, "short_factor has 5 factors; 8 rotary .* need 4"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0, 3.0, 0.0]}}, "short_factor is 0.0"),
        ({"vocab_size": 2**24, "hidden_size": 2**21, "head_dim": 8}, "parameters; at most"),
    ],
)  # fmt: skip
def test_derived_sizes_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MistralForCausalLM", {"sliding_window": -5}, "sliding_window is -5"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
        ("MistralForCausalLM", {"num_hidden_layers": 10**12}, "num_hidden_layers is"),
        ("GPT2LMHeadModel", {"n_layer": 10**12}, "n_layer is"),
        ("GPT2LMHeadModel", {"n_positions": -1}, "n_positions is -1"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar is -4"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0"),
        ("Gemma2ForCausalLM", {"layer_types": [["full"]]}, "wrong type"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("GraniteForCausalLM", {"embedding_multiplier": None}, "embedding_multiplier is None"),
        ("GraniteForCausalLM", {"embedding_multiplier": float("inf")}, "embedding_multiplier is inf"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": 3}, "no_rope_layers is 3; it must be a list"),
        ("Qwen2ForCausalLM", {"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
        ("GlmForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor is 2"),
    ],
)
def test_families_check_their_own_keys(architecture, changes, message):
    with pytest.raises(ValueError, match=message):
        read(architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok is 7; there are 6 experts \(num_experts\)"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"num_local_experts": 2.5}, "num_local_experts is 2.5"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
    ],
)
def test_experts(changes, message):
    family = model_class({"architectures": ["MixtralForCausalLM"]})
    hf = SMALL | {"num_local_experts": 6, "num_experts_per_tok": 2} | changes
    with pytest.raises(ValueError, match=message):
        family.read_config(hf)
        family.configure_experts(hf)


def test_attention_layers_of_any_model_are_checked():
    with pytest.raises(ValueError, match="6 heads of 8 over 4 KV heads"):
        Attention(0, 6, 4, 8, 1.0)
    with pytest.raises(ValueError, match="over 0 KV heads"):
        Attention(0, 6, 0, 8, 1.0)


def test_numbers_from_outside():
    assert whole_number("n", 3) == 3 and finite_number("x", 2, above=0) == 2.0
    with pytest.raises(ValueError, match="n is True; it must be a whole number from 1 to 9"):
        whole_number("n", True, maximum=9)
    with pytest.raises(ValueError, match=r"^x is a number of 16610 bits; "):
        finite_number("x", 10**5000)
    with pytest.raises(ValueError, match=r"x is 0.5; it must be a finite number above 1, at most 3"):
        finite_number("x", 0.5, above=1, maximum=3)


@needs_c
def test_kernels_refuse_sizes_that_would_read_or_write_elsewhere():
    slots = positions = torch.zeros(1, dtype=torch.int64)

    def rotate(head_dim: int, rotary: int) -> torch.Tensor:
        cache = torch.zeros(1, 2, 1, 16, head_dim)
        return native.rope_and_write(
            torch.zeros(1, 3 * head_dim), 1, None, torch.ones(1, rotary), positions, cache, slots
        )

    assert rotate(64, 64).shape == (1, 1, 64)
    for head_dim, rotary in ((64, 128), (64, 256000), (64, 33), (2048, 64)):
        with pytest.raises(ValueError, match="quire_rope_and_write was called with sizes"):
            rotate(head_dim, rotary)
    assert native.attention_fits(8, 2, 64)
    for heads, kv_heads in ((6, 4), (2, 4), (4, 0), (0, 4), (4, -4)):
        assert not native.attention_fits(heads, kv_heads, 64)
    with pytest.raises(ValueError, match="float32"):
        native.rms_norm(torch.zeros(1, 8), None, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="quire_route"):
        native.native_function("quire_route")(None, None, None, None, 1, 2, 3, 1, 1, 0, 0.0, 1.0, 0, 0, 0, 1, 0)


@needs_c
def test_a_row_beyond_a_quantized_weight_is_refused():
    weight = quantized.quantize("Q8_0", torch.randn(40, 32))
    assert quantized.lookup(torch.tensor([0, 39]), weight, torch.float32).shape == (2, 32)
    for wrong in (40, -1, 2**40):
        with pytest.raises(ValueError, match="quire_quantized_lookup"):
            quantized.lookup(torch.tensor([0, wrong]), weight, torch.float32)


@needs_c
def test_blocks_are_packed_only_if_their_size_fits():
    blocks = torch.zeros(4, 34, dtype=torch.uint8)
    assert quantized.pack("Q8_0", blocks, 32).outputs == 4
    for inputs, rows, half in ((64, None, 0), (33, None, 0), (0, None, 0), (32, range(2, 6), 0), (32, None, 3)):
        with pytest.raises(ValueError):
            quantized.pack("Q8_0", blocks, inputs, rows, half)


@needs_c
def test_the_bytes_of_a_panel_are_64_bits():
    inputs = 2**28  # 16 outputs of Q8_0 take 4.5 GB
    assert native.native_function("quire_quantized_panel_bytes")(quantized.FORMATS["Q8_0"].index, inputs) == inputs * 17


@needs_c
def test_a_failed_allocation_is_a_memory_error():
    """In a process of its own, whose memory is limited before a product asks for more."""
    code = """
import resource, torch
from quire.kernels.native import quantized
torch.set_num_threads(1)
weight = quantized.fuse([quantized.quantize("Q8_0", torch.zeros(16, 2**21))])
x = torch.zeros(64, 2**21)
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + 2**20,) * 2)
try:
    quantized.linear(x, weight, None)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "quire_quantized_linear could not allocate memory" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "fp8", "weight_block_size": [0, 16]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": ["128", 128]},
        {"quant_method": "fp8", "ignored_layers": [7]},
        {"quant_method": "fp8", "ignored_layers": ["re:("]},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": ["x"]},
    ],
)
def test_quantization_configs(stored):
    with pytest.raises(ValueError, match="quantization_config"):
        choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, torch.device("cpu"))


def test_a_model_that_is_larger_than_memory(tmp_path, monkeypatch):
    def none_left(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8796093022208 bytes")

    monkeypatch.setattr(model_class({"architectures": ["LlamaForCausalLM"]}), "__init__", none_left)
    config = SMALL | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match=r"needs more memory than there is: .*8796093022208"):
        load_model(Checkpoint("x", "dummy", tmp_path, ()), config, torch.float32, "cpu")


def test_a_config_that_transformers_cannot_build(tmp_path):
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 64, "n_head": 0}
    with pytest.raises(ValueError, match="transformers"):
        load_model(Checkpoint("x", "dummy", tmp_path, ()), config, torch.float32, "cpu")


def test_code_of_models_is_not_imported_from_a_folder_that_others_can_write_to(tmp_path, monkeypatch, caplog):
    from transformers import dynamic_module_utils

    for mode, is_safe in ((0o700, True), (0o777, False)):
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules").chmod(mode)
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        library._secure_code_cache()
        assert (str(tmp_path / "modules") == dynamic_module_utils.HF_MODULES_CACHE) == is_safe
        assert ("cache of remote code is not used" in caplog.text) != is_safe
