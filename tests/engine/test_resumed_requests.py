"""Requests that go on after tokens generated elsewhere, and prompts whose blocks have keys of their own."""

import pytest

from quire import LLM, SamplingParams
from quire.engine.input_processor import ParsedPrompt
from quire.messages.requests import ContentKey
from quire.messages.sampling_params import RequestOutputKind
from tests.tiny_models import prompts, save_tiny

PROMPT = prompts((37,))[0]
SAMPLED = SamplingParams(
    seed=5,
    temperature=1.2,
    max_tokens=40,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    min_tokens=20,
    logprobs=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model):
    with engine(model) as llm:
        yield llm


def engine(model, **arguments):
    return LLM(model, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64, **arguments)


def complete(llm, prompt, params):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.parametrize("count", [1, 15, 16, 39])
def test_a_request_goes_on_as_if_it_had_never_moved(llm, count):
    whole = complete(llm, PROMPT, SAMPLED)
    llm.reset_prefix_cache()  # as in another engine
    resumed = complete(llm, {"prompt_token_ids": PROMPT, "output_token_ids": whole.token_ids[:count]}, SAMPLED)
    assert resumed.token_ids == whole.token_ids and resumed.finish_reason == "length"
    assert len(resumed.logprobs) == 40 - count
    assert [list(entry) for entry in resumed.logprobs] == [list(entry) for entry in whole.logprobs[count:]]


def test_the_ids_reach_an_engine_in_another_process(model, llm):
    whole = complete(llm, PROMPT, SAMPLED)
    with engine(model, multiprocess=True) as other:
        prompt = {"prompt_token_ids": PROMPT, "output_token_ids": whole.token_ids[:25]}
        assert complete(other, prompt, SAMPLED).token_ids == whole.token_ids


def test_stop_tokens_end_a_resumed_request_where_they_would_have(llm):
    whole = complete(llm, PROMPT, SAMPLED).token_ids
    last = next(i for i in range(20, 40) if whole[i] not in whole[:i])
    params = SAMPLED.replace(stop_token_ids=[whole[last]])
    stopped = complete(llm, {"prompt_token_ids": PROMPT, "output_token_ids": whole[:10]}, params)
    assert stopped.token_ids == whole[: last + 1] and stopped.stop_reason == whole[last]


def test_only_tokens_generated_here_are_streamed(llm):
    whole = complete(llm, PROMPT, SAMPLED).token_ids
    params = SAMPLED.replace(output_kind=RequestOutputKind.DELTA)
    llm.llm_engine.add_request("a", {"prompt_token_ids": PROMPT, "output_token_ids": whole[:30]}, params)
    parts = []
    while llm.llm_engine.has_unfinished_requests():
        parts += [output.outputs[0] for output in llm.llm_engine.step()]
    assert [token for part in parts for token in part.token_ids] == whole[30:]
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)


@pytest.mark.parametrize(
    ("outputs", "params", "error"),
    [
        ([3] * 40, SAMPLED, "at most 39"),
        ([3] * 600, SamplingParams(max_tokens=None), "at most 474"),
        ([300], SAMPLED, "output_token_ids has token id 300"),
        ([3], SamplingParams(n=2), "must be 1"),
    ],
)
def test_ids_that_cannot_be_resumed_from_are_rejected(llm, outputs, params, error):
    with pytest.raises(ValueError, match=error):
        complete(llm, {"prompt_token_ids": PROMPT, "output_token_ids": outputs}, params)


def test_content_behind_placeholder_tokens_separates_the_blocks_that_hold_it(llm):
    """Two images at tokens 20 to 29 of equal prompts: the block before them is shared, theirs and later ones not."""
    llm.reset_prefix_cache()
    ids = prompts((70,))[0]
    params = SamplingParams(temperature=0, max_tokens=1)

    def num_cached(*keys):
        prompt = ParsedPrompt(None, ids, content_keys=keys)
        llm.llm_engine.add_request("a", prompt, params)
        while not (outputs := llm.llm_engine.step()):
            pass
        return outputs[-1].num_cached_tokens

    cat, dog = ContentKey(20, 30, b"cat"), ContentKey(20, 30, b"dog")
    assert [num_cached(cat), num_cached(cat), num_cached(dog), num_cached(dog)] == [0, 64, 16, 64]
    assert num_cached(ContentKey(21, 31, b"cat")) == 16  # the same content elsewhere in the block
    assert num_cached(cat, ContentKey(40, 41, b"dog")) == 32
    assert num_cached() == 16
