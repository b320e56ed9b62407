import json
import math
from pathlib import Path

import numpy as np
import pytest

from quire.checkpoint import resolve_model
from quire.checkpoint.config import load_eos_token_ids, load_generation_config, load_hf_config
from tests.checkpoint.gguf_files import random_floats, write_gguf


def hf_folder(folder: Path, config: dict, generation: dict | None = None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return resolve_model(str(folder), load_format="dummy")


def test_embedded_model():
    ckpt = resolve_model(None)
    config = load_hf_config(ckpt)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert load_eos_token_ids(ckpt, config) == (2,)
    assert load_generation_config(ckpt) == {}


def test_config_json_is_passed_on_unchanged(tmp_path):
    config = {"architectures": ["X"], "text_config": {"hidden_size": 8, "eos_token_id": 5}, "eos_token_id": 7}
    ckpt = hf_folder(tmp_path, config, {"eos_token_id": [7, 9], "temperature": 0.6})
    assert load_hf_config(ckpt) == config
    assert load_eos_token_ids(ckpt, config) == (5, 7, 9)
    assert load_generation_config(ckpt)["temperature"] == 0.6


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "</s>"}}}},
        {"special_tokens_map.json": {"eos_token": {"content": "</s>"}}, "added_tokens.json": {"</s>": 7}},
        {
            "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
            "tokenizer.json": {"added_tokens": [{"id": 7, "content": "</s>"}], "model": {"vocab": {"</s>": 1}}},
        },
        {"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": {"model": {"vocab": {"a": 0, "</s>": 7}}}},
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "tokenizer.json": {"model": {"vocab": [[str(i), 0.0] for i in range(7)] + [["</s>", 0.0]]}},
        },
        {"tokenizer_config.json": {"eos_token": "</s>"}, "vocab.json": {"</s>": 7}},
    ],
)
def test_eos_of_the_tokenizer_where_no_config_names_one(tmp_path, files):
    ckpt = hf_folder(tmp_path, {"eos_token_id": None}, {})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_eos_token_ids(ckpt, {"eos_token_id": None}) == (7,)
    assert load_eos_token_ids(ckpt, {"eos_token_id": 3}) == (3,)


def test_no_eos_anywhere(tmp_path):
    ckpt = hf_folder(tmp_path, {})
    assert load_eos_token_ids(ckpt, {}) == ()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "gone"}')
    assert load_eos_token_ids(ckpt, {}) == ()


def test_broken_config_json(tmp_path):
    ckpt = hf_folder(tmp_path, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_hf_config(ckpt)


def gguf_config(tmp_path: Path, *, tensors=None, **options):
    tensors = tensors or {"token_embd.weight": (random_floats(300, 32), None)}
    ckpt = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors, **options)))
    return ckpt, load_hf_config(ckpt)


def test_qwen3_with_its_own_head_size_and_untied_output(tmp_path):
    tensors = {
        "token_embd.weight": (random_floats(304, 32), None),
        "output.weight": (random_floats(304, 32), None),
        "blk.0.attn_q.bias": (random_floats(32), None),
    }
    metadata = {"qwen3.attention.key_length": 128, "qwen3.attention.sliding_window": 512}
    _, config = gguf_config(tmp_path, tensors=tensors, architecture="qwen3", metadata=metadata)
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["head_dim"], config["vocab_size"], config["sliding_window"]) == (128, 304, 512)
    assert config["attention_bias"] and not config["tie_word_embeddings"]
    assert config["torch_dtype"] == "float32"


def test_unsupported_architecture_lists_the_supported(tmp_path):
    with pytest.raises(ValueError, match=r"'mamba'.*supported: llama, qwen2, qwen3"):
        gguf_config(tmp_path, architecture="mamba")


def test_a_mixture_of_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"mixture of experts .*'gemma'.*supported: llama, qwen2moe"):
        gguf_config(tmp_path, architecture="gemma", metadata={"gemma.expert_count": 8})


def test_a_mixture_needs_its_experts(tmp_path):
    """Files of before 2024 have a tensor for each."""
    with pytest.raises(ValueError, match=r"no experts \(ffn_down_exps\).*convert the model again"):
        gguf_config(tmp_path, metadata={"llama.expert_count": 8})
    flat = {"blk.0.ffn_down_exps.weight": (random_floats(8, 256), None)}
    with pytest.raises(ValueError, match="of three dimensions"):
        gguf_config(tmp_path, tensors=flat, metadata={"llama.expert_count": 8})


def test_a_mixture_that_claims_billions_of_layers(tmp_path):
    tensors = {"blk.0.ffn_down_exps.weight": (random_floats(4, 8, 32), None)}
    metadata = {"qwen3moe.expert_used_count": 2, "qwen3moe.block_count": 2**31 - 1}
    _, config = gguf_config(tmp_path, tensors=tensors, architecture="qwen3moe", metadata=metadata)
    assert config["num_experts"] == 4 and len(config["mlp_only_layers"]) <= 1


def test_yarn(tmp_path):
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }
    _, config = gguf_config(tmp_path, metadata=metadata)
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def llama3_factors(pairs: int, theta: float, factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for index in range(pairs):
        wavelength = 2 * math.pi * theta ** (index / pairs)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_is_recognised_by_its_factors(tmp_path):
    tensors = {
        "token_embd.weight": (random_floats(300, 32), None),
        "rope_freqs.weight": (llama3_factors(64, 10000.0, 32.0), None),
    }
    _, config = gguf_config(tmp_path, tensors=tensors)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors["rope_freqs.weight"] = (random_floats(64), None)
    with pytest.raises(ValueError, match="rope factors"):
        gguf_config(tmp_path, tensors=tensors)


def test_gguf_stops_at_end_of_turn_and_end_of_text(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "b"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 4, 1],  # <|eot_id|> is an ordinary token here
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 0,
    }
    ckpt, config = gguf_config(tmp_path, metadata=metadata)
    assert load_eos_token_ids(ckpt, config) == (0, 2, 4, 5)
