"""The model's files combined with the user's options: config overrides, sampling defaults."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig, ModelConfig
from quire.engine.resolve_config import longest_sequence, resolve_config, vocab_size
from tests.tiny_models import save_tiny

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "eos_token_id": 3,
}


def write(folder: Path, config: dict[str, Any] | None = None, generation: Any = None) -> str:
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def resolved(model: str, **options: Any) -> ModelConfig:
    return resolve_config(EngineConfig.from_kwargs(model=model, load_format="dummy", **options))[0].model


def test_overrides_are_merged_before_anything_is_read(tmp_path: Path) -> None:
    changes = {"vocab_size": 99, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": 5}
    model = resolved(write(tmp_path), hf_overrides=changes)
    assert model.hf_config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    assert (model.vocab_size, model.derived_max_model_len, model.eos_token_ids) == (99, 256, (5,))
    assert model.hf_overrides == changes
    assert CONFIG["vocab_size"] == 211


def test_a_limit_beyond_the_models_positions_is_allowed_by_an_override(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has positions for 128 tokens"):
        resolved(write(tmp_path), max_model_len=200)
    assert (
        resolved(str(tmp_path), max_model_len=200, hf_overrides={"max_position_embeddings": 200}).derived_max_model_len
        == 200
    )


def test_without_a_sliding_window(tmp_path: Path) -> None:
    model = write(tmp_path, CONFIG | {"sliding_window": 32})
    assert resolved(model).max_model_len is None
    assert resolved(model, disable_sliding_window=True).max_model_len == 32
    assert resolved(model, disable_sliding_window=True, max_model_len=16).max_model_len == 16
    with pytest.raises(ValueError, match=r"without its sliding window .* serves 32 tokens"):
        resolved(model, disable_sliding_window=True, max_model_len=64)
    unused = CONFIG | {"sliding_window": 32, "use_sliding_window": False}
    assert resolved(write(tmp_path, unused), disable_sliding_window=True).max_model_len is None


def test_old_names_of_rope_reach_a_new_config(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    model = resolved(write(tmp_path), hf_overrides={"rope_scaling": scaling, "rope_theta": 7.0})
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 7.0}
    assert model.hf_config["rope_parameters"] == rope
    assert model.derived_max_model_len == 512
    old = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
    assert resolved(write(tmp_path, old), hf_overrides={"rope_scaling": scaling}).hf_config["rope_scaling"] == scaling
    by_layer = CONFIG | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}
    with pytest.raises(ValueError, match=r"rope_theta.* for each of full_attention; give rope_parameters"):
        resolved(write(tmp_path, by_layer), hf_overrides={"rope_theta": 7.0})


def test_a_function_may_override_and_what_it_did_can_cross_to_another_process(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> dict[str, Any]:
        config["rope_parameters"]["rope_theta"] = 9.0
        return config

    model = resolved(write(tmp_path), hf_overrides=change)
    assert pickle.loads(pickle.dumps(model)) == model
    assert model.hf_overrides == {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    assert resolved(str(tmp_path), hf_overrides=model.hf_overrides).hf_config == model.hf_config
    with pytest.raises(ValueError, match="hf_overrides returned a NoneType"):
        resolved(str(tmp_path), hf_overrides=lambda config: None)


def test_a_config_is_resolved_once(tmp_path: Path) -> None:
    once, _ = resolve_config(EngineConfig.from_kwargs(model=write(tmp_path), load_format="dummy"))
    write(tmp_path, CONFIG | {"vocab_size": 5})
    assert resolve_config(once)[0] is once


def test_lengths_and_vocabulary_by_any_name() -> None:
    assert longest_sequence({"n_positions": 1024}) == 1024
    assert longest_sequence({"max_seq_len": 300, "text_config": {"max_position_embeddings": 64}}) == 64
    assert longest_sequence({}) == 2048
    assert vocab_size({"text_config": {"vocab_size": 7}}) == 7
    with pytest.raises(ValueError, match="vocab_size None; it must be a whole number"):
        vocab_size({})


RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9, "min_p": None}
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}


def test_sampling_defaults_come_from_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire"):
        model = resolved(write(tmp_path, generation=RECOMMENDED | {"eos_token_id": [3, 4]}))
    assert model.default_sampling == SAMPLING
    assert caplog.messages == [
        "sampling defaults: temperature 0.6, top_k 20, top_p 0.95, max_tokens 9 "
        f"(from {tmp_path / 'generation_config.json'})"
    ]
    for setting in ("quire", "vllm"):
        model = resolved(str(tmp_path), generation_config=setting)
        assert model.default_sampling == {} and model.eos_token_ids == (3, 4)  # EOS is not a sampling default


def test_another_folder_and_single_values(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    model = write(tmp_path, generation=RECOMMENDED)
    assert resolved(model, generation_config=str(tmp_path / "other")).default_sampling == {"repetition_penalty": 1.1}
    changed = resolved(model, override_generation_config={"temperature": 0.0, "max_new_tokens": None})
    assert changed.default_sampling == {"temperature": 0.0, "top_k": 20, "top_p": 0.95}
    alone = resolved(model, generation_config="quire", override_generation_config={"top_p": 0.5})
    assert alone.default_sampling == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            {"temperature": "hot"},
            {},
            r"generation_config.json: temperature must be a finite number, got 'hot'; correct",
        ),
        ({"max_new_tokens": -1}, {}, r"generation_config.json: max_new_tokens is -1; it must be a whole number"),
        ({"top_p": 0.0}, {}, r"top_p is 0.0; it must be above 0 and at most 1; .*--generation-config quire"),
        ([], {}, "must hold a JSON object"),
        ({}, {"generation_config": "nowhere"}, r"there is no nowhere/generation_config.json; allowed: auto, quire or"),
        ({}, {"override_generation_config": {"temprature": 1}}, "has 'temprature'; did you mean 'temperature'"),
        ({}, {"override_generation_config": {"xyz": 1}}, "has 'xyz'; allowed: temperature, top_p"),
        ({}, {"override_generation_config": {"top_k": 0.5}}, "override_generation_config: top_k is 0.5; it must be"),
    ],
)
def test_wrong_defaults_are_named(tmp_path: Path, content: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(write(tmp_path, generation=content), **options)


def test_offline_they_hold_where_no_parameters_are_given(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 1 << 24}
    with LLM(str(tmp_path), skip_tokenizer_init=True, **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5)
        first, second = (llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)[0] for _ in range(2))
        assert len(first.outputs[0].token_ids) == 5
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        [own] = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2), use_tqdm=False)
        assert len(own.outputs[0].token_ids) == 2
