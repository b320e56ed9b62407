"""What the config.json of a draft model or head says about how to run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.draft_config import resolve_drafts
from quire.config import LoadConfig
from quire.config.speculative import SpeculativeConfig

SPECULATORS = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}]},
    "draft_vocab_size": 50,
}


def resolved(folder: Path, hf_config: dict[str, Any], **options: Any) -> SpeculativeConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    config = SpeculativeConfig(spec_model=str(folder), **options)
    return resolve_drafts(config, LoadConfig(), {}, 100, False)


@pytest.mark.parametrize(
    ("hf_config", "method", "count"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100}, "draft_model", 4),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "eagle", 3),
        ({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 100}, "eagle3", 3),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "draft_vocab_size": 30}, "eagle3", 3),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "medusa", 5),
        ({"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 2}, "medusa", 2),
        (SPECULATORS, "eagle3", 5),
    ],
)
def test_the_method_is_read_from_the_draft_model(
    tmp_path: Path, hf_config: dict[str, Any], method: str, count: int
) -> None:
    found = resolved(tmp_path, hf_config)
    assert (found.method, found.num_drafts, found.model) == (method, count, str(tmp_path))
    assert found.hf_config == hf_config
    assert resolved(tmp_path, hf_config, spec_tokens=2).num_drafts == 2
    assert resolved(tmp_path, hf_config | {"vocab_size": 100}, spec_method="draft_model").method == "draft_model"


def test_published_heads_without_words_of_their_own_are_known_by_name(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}
    assert resolved(tmp_path / "EAGLE-LLaMA3-Instruct-8B", llama).method == "eagle"
    assert resolved(tmp_path / "Qwen3-8B_eagle3", llama).method == "eagle3"


def test_the_models_own_heads(tmp_path: Path) -> None:
    target = {"num_nextn_predict_layers": 2}
    found = resolve_drafts(SpeculativeConfig(spec_method="mtp"), LoadConfig(), target, 100, False)
    assert (found.method, found.num_drafts, found.hf_config) == ("mtp", 2, target)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary of 99 tokens, the model that it drafts for one of 100"):
        resolved(tmp_path, {"architectures": ["LlamaForCausalLM"], "vocab_size": 99})


def test_an_algorithm_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="algorithm 'other'; allowed: ngram"):
        resolved(tmp_path, {"speculators_config": {"algorithm": "other"}})


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="No model at"):
        resolve_drafts(SpeculativeConfig(spec_model="./none"), LoadConfig(), {}, 100, False)
