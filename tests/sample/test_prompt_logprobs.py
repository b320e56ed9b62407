import warnings
from types import SimpleNamespace

import numpy as np
import torch

from quire.messages.sampling_params import SamplingParams
from quire.sample.prompt_logprobs import PromptLogprobsTracker
from tests.sample.rows import new_row


def plan(rows: list[int], num_tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(rows=np.array(rows), num_tokens=np.array(num_tokens))


def tracker_of(prompt: np.ndarray) -> PromptLogprobsTracker:
    tracker = PromptLogprobsTracker(lambda hidden, tokens: hidden[tokens], "raw_logprobs")
    tracker.add_row(new_row(3, SamplingParams(prompt_logprobs=1), prompt))
    return tracker


def test_needed_until_the_whole_prompt_has_logprobs():
    tracker = tracker_of(np.arange(5, dtype=np.int32))
    assert not tracker.needed(plan([0, 1], [1, 1]))  # it is not in this step
    for num_tokens, found in ((3, 3), (2, 1)):
        step = plan([0, 3], [1, num_tokens])
        assert tracker.needed(step)
        (part,) = tracker.compute(step, torch.randn(1 + num_tokens, 8))
        assert len(part.logprobs) == found
    assert not tracker.needed(plan([0, 3], [1, 1]))  # it generates now


def test_a_prompt_that_is_read_only():
    prompt = np.arange(5, dtype=np.int32)
    prompt.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (part,) = tracker_of(prompt).compute(plan([3], [5]), torch.randn(5, 8))
    assert part.token_ids[:, 0].tolist() == [1, 2, 3, 4]
