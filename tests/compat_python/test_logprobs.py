"""Logprobs of named tokens, of candidates along a prompt, and in columns: vLLM's parameters."""

import numpy as np
import pytest
from quire.logprobs import FlatLogprobs

from quire import SamplingParams
from quire.sampling_params import RequestOutputKind

PROMPT = "The capital of Italy is"


def generate(llm, prompt=PROMPT, **params):
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, **params), use_tqdm=False)[0]


def all_logprobs(llm, prompt=PROMPT):
    """The likeliest fifty of each generated token."""
    return generate(llm, prompt, logprobs=50).outputs[0].logprobs


def test_logprobs_of_named_tokens(llm):
    every = all_logprobs(llm)
    named = [*list(every[0])[3:6], 7]  # not the likeliest, and one that is unlikely
    completion = generate(llm, logprob_token_ids=named).outputs[0]
    assert completion.token_ids == [next(iter(entry)) for entry in every]
    for token, entry, full in zip(completion.token_ids, completion.logprobs, every, strict=True):
        assert list(entry) == [token, *(other for other in named if other != token)]
        assert entry[token].rank == 1
        for other in named:
            if other in full:
                assert entry[other].logprob == pytest.approx(full[other].logprob, abs=1e-4)
    assert completion.logprobs[0][7].logprob < min(found.logprob for found in every[0].values())


def test_requests_with_and_without_named_tokens_share_a_step(llm):
    wanted = [{"logprob_token_ids": [5, 6, 7]}, {"logprobs": 2}, {}, {"logprob_token_ids": [9], "logprobs": 3}]
    params = [SamplingParams(temperature=0, max_tokens=3, **one) for one in wanted]
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    found = [output.outputs[0].logprobs for output in outputs]
    assert [None if entries is None else len(entries[0]) for entries in found] == [4, 2, None, 2]
    alone = [generate(llm, **one).outputs[0].logprobs for one in wanted]
    for together, by_itself in zip(found, alone, strict=True):
        if together is not None:
            assert [list(entry) for entry in together] == [list(entry) for entry in by_itself][:3]


def test_named_tokens_are_the_models(llm):
    with pytest.raises(ValueError, match="logprob_token_ids has token id 999999"):
        generate(llm, logprob_token_ids=[999999])
    with pytest.raises(ValueError, match="logprob_token_ids has 129 entries; at most 128"):
        SamplingParams(logprob_token_ids=list(range(129)))


def test_candidates_along_a_prompt_are_scored(llm):
    ids = llm.get_tokenizer().encode("Rome is the capital of Italy, and Paris is the capital of France.")
    full = generate(llm, {"prompt_token_ids": ids}, prompt_logprobs=50).prompt_logprobs
    start = 4
    rows = [list(full[i])[:3] for i in range(start + 1, len(ids))]
    rows[2] = rows[2][:1]  # shorter ones count as filled up with -1
    output = generate(
        llm, {"prompt_token_ids": ids}, prompt_logprob_token_ids=rows, prompt_logprob_start=start, logprobs=1
    )
    scores = output.prompt_token_id_logprobs
    assert scores.shape == (len(ids) - 1 - start, 3) and output.prompt_logprobs is None
    for i, row in enumerate(rows):
        expected = [full[start + 1 + i][token].logprob for token in row] + [-np.inf] * (3 - len(row))
        assert scores[i].tolist() == pytest.approx(expected, abs=1e-4)
    assert output.num_cached_tokens == 0  # what is cached has no logits to score


def test_candidates_and_prompt_logprobs_at_once_in_small_steps(llm):
    ids = llm.get_tokenizer().encode(PROMPT * 20)
    rows = np.full((len(ids) - 1, 2), 11, np.int32)
    both = generate(llm, {"prompt_token_ids": ids}, prompt_logprob_token_ids=rows, prompt_logprobs=0)
    assert both.prompt_token_id_logprobs.shape == rows.shape and len(both.prompt_logprobs) == len(ids)
    assert np.isfinite(both.prompt_token_id_logprobs).all()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"prompt_logprob_token_ids": [[1]]}, "has 1 rows; a prompt of 5 tokens has 4"),
        ({"prompt_logprob_token_ids": [[1, -2]] * 4}, "no token id"),
        ({"prompt_logprob_token_ids": [1, 2, 3, 4]}, "a list of token ids for each position"),
        ({"prompt_logprob_token_ids": [[]] * 4}, "at least one row"),
        ({"prompt_logprob_token_ids": [[1] * 51] * 4}, "a row of 51 ids; at most 50"),
        ({"prompt_logprob_token_ids": [[999999]] * 4}, "token id 999999"),
        ({"prompt_logprob_start": 2}, "give those too"),
    ],
)
def test_wrong_candidates_are_refused(llm, params, error):
    with pytest.raises(ValueError, match=error):
        generate(llm, {"prompt_token_ids": [1, 2, 3, 4, 5]}, **params)


def test_logprobs_in_columns_read_like_a_list(llm):
    plain = generate(llm, logprobs=2, prompt_logprobs=1)
    flat = generate(llm, logprobs=2, prompt_logprobs=1, flat_logprobs=True)
    columns, entries = flat.outputs[0].logprobs, plain.outputs[0].logprobs
    assert isinstance(columns, FlatLogprobs) and list(columns) == entries and columns[1:3][0] == entries[1]
    assert columns.token_ids == [token for entry in entries for token in entry]
    assert columns[len(columns) :][:] == FlatLogprobs() and columns[-1] == entries[-1]
    assert list(flat.prompt_logprobs)[1:] == plain.prompt_logprobs[1:] and flat.prompt_logprobs[0] == {}
    with pytest.raises(TypeError, match="appended"):
        columns[0] = {}


@pytest.mark.parametrize("interval", [1, 4, 100])
def test_several_tokens_in_an_output(llm, interval):
    engine, sizes, text = llm.llm_engine, [], ""
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA, stream_interval=interval
    )
    engine.add_request("one", PROMPT, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            sizes.append(len(output.outputs[0].token_ids))
            text += output.outputs[0].text
    assert sizes == {1: [1] * 10, 4: [1, 4, 4, 1], 100: [1, 9]}[interval]
    assert text == llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_a_request_that_does_not_read_the_prefix_cache(llm):
    prompt = "word " * 40
    warm = [generate(llm, prompt, skip_reading_prefix_cache=skip) for skip in (None, None, True, False)]
    assert [output.num_cached_tokens > 0 for output in warm[1:]] == [True, False, True]
    assert len({output.outputs[0].text for output in warm}) == 1
