"""Prompts become requests; the caller's objects are not modified."""

import pytest

from quire.config import EngineConfig
from quire.engine.input_processor import InputProcessor, ParsedPrompt
from quire.messages.sampling_params import SamplingParams


@pytest.fixture
def processor() -> InputProcessor:
    config = EngineConfig()
    config.model.vocab_size = 100
    return InputProcessor(config, max_model_len=16, tokenizer=None)


def test_truncation_does_not_change_the_callers_prompt(processor: InputProcessor) -> None:
    prompt = ParsedPrompt(None, [1, 2, 3, 4, 5], cache_salt="s")
    parsed, request = processor.process("a", prompt, SamplingParams(truncate_prompt_tokens=2))
    assert parsed == ParsedPrompt(None, [4, 5], "s") and request.prompt_token_ids.tolist() == [4, 5]
    assert prompt == ParsedPrompt(None, [1, 2, 3, 4, 5], "s")
    _, whole = processor.process("b", prompt, SamplingParams())
    assert whole.prompt_token_ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("length", "fits"), [(15, True), (16, False)])
def test_a_prompt_leaves_room_for_one_token(processor: InputProcessor, length: int, fits: bool) -> None:
    if fits:
        processor.process("a", [1] * length, SamplingParams())
    else:
        with pytest.raises(ValueError, match="16 tokens; with max_model_len 16 it may have at most 15"):
            processor.process("a", [1] * length, SamplingParams())
    longest, _ = processor.process("b", [1] * 40, SamplingParams(truncate_prompt_tokens=-1))
    assert len(longest.token_ids) == 15


def test_completions_of_one_request_have_distinct_indices(processor: InputProcessor) -> None:
    _, first = processor.process("a", [1], SamplingParams(n=3))
    _, second = processor.process("b", [1], SamplingParams())
    assert second.index == first.index + 3
