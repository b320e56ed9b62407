"""Options of speculative decoding: vLLM's keys, the flags of single keys, and mistakes."""

from typing import Any

import pytest

from quire.config import EngineConfig, logs
from quire.config.speculative import DEFAULT_DRAFTS, SpeculativeConfig
from tests.config.test_flags import parse


def config(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(speculative_config=keys)


def test_off_by_default() -> None:
    for given in (SpeculativeConfig(), SpeculativeConfig(speculative_config={})):
        assert (given.method, given.num_drafts) == (None, 0)


def test_flags_of_single_keys() -> None:
    given = parse("--spec-method", "ngram", "--spec-tokens", "5", "--no-spec-adaptive")
    found = EngineConfig.from_kwargs(**given).speculative
    assert (found.method, found.num_drafts, found.adaptive) == ("ngram", 5, False)
    assert EngineConfig.from_kwargs(**parse("-sc", '{"method": "ngram"}')).speculative.adaptive
    both = EngineConfig.from_kwargs(**parse("-sc.prompt_lookup_max", "7", "--spec-method", "ngram")).speculative
    assert (both.prompt_lookup_min, both.prompt_lookup_max) == (7, 7)


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp", "package.module:Class"])
def test_a_method_alone_is_enough(method: str) -> None:
    assert config(method=method).num_drafts == DEFAULT_DRAFTS.get(method, 3)


def test_other_names_of_methods() -> None:
    assert config(model="ngram", num_speculative_tokens=2).method == "ngram"
    assert config(method="ngram_gpu").method == "ngram"
    assert config(method="deepseek_mtp").method == "mtp"


def test_keys_of_methods() -> None:
    found = config(
        method="suffix",
        suffix_decoding_max_tree_depth=8,
        suffix_decoding_max_cached_requests=0,
        num_speculative_tokens=6,
    )
    assert (found.suffix_decoding_max_tree_depth, found.suffix_decoding_max_cached_requests) == (8, 0)
    assert (found.suffix_decoding_max_spec_factor, found.suffix_decoding_min_token_prob) == (1.0, 0.1)
    draft = config(method="draft_model", model="a/b", quantization="fp8", max_model_len=64, revision="main")
    assert (draft.model, draft.quantization, draft.max_model_len, draft.revision) == ("a/b", "fp8", 64, "main")
    assert draft.draft_sample_method == "greedy"
    assert config(method="eagle", model="a/b", draft_sample_method="probabilistic").draft_sample_method


def test_keys_without_meaning_are_accepted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_said", set())
    with caplog.at_level("INFO", logger="quire"):
        config(
            method="ngram", draft_tensor_parallel_size=1, rejection_sample_method="standard", parallel_drafting=False
        )
    assert [record.getMessage() for record in caplog.records] == [
        "--speculative-config: draft_tensor_parallel_size is accepted: it is shared as the model is"
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "magic"}, "method is 'magic'; allowed: ngram, suffix, draft_model"),
        ({"method": 3}, "method is 3; it must be a text"),
        ({"method": "dflash"}, "not available yet: the method dflash"),
        ({"num_speculative_tokens": 3}, "needs a method"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "whole number from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": True}, "whole number from 1 to 32"),
        ({"method": "ngram", "num_tokens": 3}, "'num_tokens'; allowed: method, model, num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}, "at most prompt_lookup_max, 5"),
        ({"method": "ngram", "prompt_lookup_max": -1}, "prompt_lookup_min is -1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "at most 1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": -0.5}, "between 0 and 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "x"}, "it must be a number"),
        ({"method": "eagle3"}, "eagle3 needs a model"),
        ({"method": "eagle", "model": "a/b", "draft_sample_method": "x"}, "allowed: greedy, probabilistic"),
        ({"method": "ngram", "rejection_sample_method": "block"}, "not available yet: further ways to accept"),
    ],
)
def test_mistakes(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**keys)


def test_a_flag_that_contradicts() -> None:
    with pytest.raises(ValueError, match="method 'ngram', a flag has 'suffix'"):
        SpeculativeConfig(speculative_config={"method": "ngram"}, spec_method="suffix")
