"""The thinking budget: when the end of reasoning is forced, and when not."""

import pytest
import torch

from quire.messages.sampling_params import ReasoningTokens, SamplingParams
from quire.sample.sampler import Sampler
from tests.sample.rows import batch, new_row

VOCAB = 20
START, END = [7], [8, 9]
PROMPT = [1, 2, 3]


def generate(
    choices: list[int], budget: int, open: bool | None, budget_end: list[int] | None = None, **params
) -> list[int]:
    """The output if the model prefers these tokens one after the other."""
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    reasoning = ReasoningTokens(start=START, end=END, open=open, budget_end=budget_end)
    wanted = SamplingParams(thinking_token_budget=budget, reasoning=reasoning, **params)
    sampler.add_row(new_row(0, wanted, PROMPT))
    token_ids = torch.zeros(8, 64, dtype=torch.int32)
    token_ids[0, : len(PROMPT)] = torch.tensor(PROMPT, dtype=torch.int32)
    out: list[int] = []
    for choice in choices:
        logits = torch.zeros(1, VOCAB)
        logits[0, choice] = 50.0
        position = len(PROMPT) + len(out)
        out.append(int(sampler.sample(logits, batch([0], position, token_ids=token_ids)).token_ids[0]))
        token_ids[0, position] = out[-1]
    return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_forced_when_the_budget_is_used_up(temperature):
    assert generate([4] * 8, 3, True, temperature=temperature, seed=1) == [4, 4, 4, 8, 9, 4, 4, 4]


def test_the_end_of_a_budget_may_have_words_of_its_own():
    assert generate([4] * 7, 2, True, budget_end=[5, 8, 9], temperature=0) == [4, 4, 5, 8, 9, 4, 4]
    assert generate([4, 8, 9, 4, 4, 4], 3, True, budget_end=[5, 8, 9], temperature=0) == [4, 8, 9, 4, 4, 4]


def test_without_any_budget_there_is_no_reasoning():
    assert generate([4] * 4, 0, True, temperature=0) == [8, 9, 4, 4]


def test_reasoning_that_ended_in_time_is_unchanged():
    assert generate([4, 8, 9, 4, 4, 4, 4], 4, True, temperature=0) == [4, 8, 9, 4, 4, 4, 4]


def test_an_end_that_was_begun_is_completed():
    assert generate([4, 4, 8, 4, 4, 4], 3, True, temperature=0) == [4, 4, 8, 8, 9, 4]


def test_the_budget_counts_from_the_start_tag_if_the_model_writes_it():
    assert generate([7, 4, 4, 4, 4, 4], 2, None, temperature=0) == [7, 4, 4, 8, 9, 4]


def test_output_without_reasoning_is_unchanged():
    assert generate([4] * 6, 2, None, temperature=0) == [4] * 6
    assert generate([4] * 6, 2, False, temperature=0) == [4] * 6


def test_the_end_is_forced_despite_other_masks():
    params = {"allowed_token_ids": [4], "logit_bias": {8: -100.0}, "temperature": 0}
    assert generate([4] * 6, 2, True, **params) == [4, 4, 8, 9, 4, 4]


def test_an_end_tag_in_the_prompt_does_not_count():
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    reasoning = ReasoningTokens(start=START, end=END, open=True)
    sampler.add_row(new_row(0, SamplingParams(thinking_token_budget=0, reasoning=reasoning, temperature=0), END))
    token_ids = torch.zeros(8, 64, dtype=torch.int32)
    token_ids[0, :2] = torch.tensor(END, dtype=torch.int32)
    assert sampler.sample(torch.zeros(1, VOCAB), batch([0], 2, token_ids=token_ids)).token_ids.tolist() == [8]


def test_invalid_budgets_are_refused():
    with pytest.raises(ValueError, match="thinking_token_budget is -2"):
        SamplingParams(thinking_token_budget=-2)
