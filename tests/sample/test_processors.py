"""Penalties, bias and masks against transformers' processors, or written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as lp

from quire.messages.sampling_params import SamplingParams
from quire.sample.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from quire.sample.penalties import Penalties
from quire.sample.sampler import Sampler
from tests.sample.rows import batch, new_row

CPU = torch.device("cpu")
VOCAB = 40
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def logits(rows=1, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def context(*rows: list[int]) -> torch.Tensor:
    ids = torch.zeros(8, 64, dtype=torch.int32)
    for row, one in enumerate(rows):
        ids[row, : len(one)] = torch.tensor(one, dtype=torch.int32)
    return ids


@given(tokens, tokens, st.floats(0.5, 2.0))
def test_repetition_penalty_equals_transformers(prompt, output, penalty):
    processor = Penalties(VOCAB, CPU)
    processor.add_row(new_row(0, SamplingParams(repetition_penalty=penalty), prompt + output, len(prompt)))
    expected = lp.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits())
    if penalty != 1:
        assert torch.allclose(processor.apply(logits(), batch([0])), expected)


@given(tokens, st.lists(st.integers(0, VOCAB - 1), max_size=12), st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_look_at_the_output_alone(prompt, output, frequency, presence):
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    processor = Penalties(VOCAB, CPU)
    processor.add_row(new_row(0, params, prompt + output, len(prompt)))
    expected = logits()
    for token in set(output):
        expected[0, token] -= frequency * output.count(token) + presence
    assert torch.allclose(processor.apply(logits(), batch([0])), expected, atol=1e-5)


@given(st.lists(tokens, min_size=1, max_size=6), tokens)
def test_counts_updated_while_sampling_equal_those_of_a_new_row(prompts, sampled):
    """As after a preemption, when the row is created again with all its tokens."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)
    kept, anew = Penalties(VOCAB, CPU), Penalties(VOCAB, CPU)
    rows = list(range(len(prompts)))
    for row, prompt in enumerate(prompts):
        kept.add_row(new_row(row, params, prompt))
        anew.add_row(new_row(row, params, prompt + sampled, len(prompt)))
    for token in sampled:
        kept.sampled(torch.full((len(rows),), token), batch(rows))
        kept.sampled(torch.full((len(rows),), 7), batch(rows, done=[False] * len(rows)))  # in mid-prompt
    assert torch.allclose(kept.apply(logits(len(rows)), batch(rows)), anew.apply(logits(len(rows)), batch(rows)))


def test_only_rows_with_penalties_have_slots():
    processor = Penalties(VOCAB, CPU)
    for row in range(8):
        processor.add_row(new_row(row, SamplingParams(presence_penalty=1.0 if row == 5 else 0.0)))
    assert list(processor.slots) == [5] and len(processor._counts) == 4
    for row in range(6, 50):
        processor.add_row(new_row(row, SamplingParams(presence_penalty=1.0)))
        processor.remove_row(row)
    assert len(processor._counts) == 4


@given(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1, max_size=10))
def test_logit_bias_equals_transformers(bias):
    processor = LogitBias(CPU)
    processor.add_row(new_row(0, SamplingParams(logit_bias=bias)))
    expected = lp.SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in bias.items()])(
        torch.tensor([[1]]), logits()
    )
    assert torch.allclose(processor.apply(logits(), batch([0])), expected)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5),
       st.lists(st.integers(0, 4), min_size=1, max_size=8))  # fmt: skip
def test_bad_words_equal_transformers(words, text):
    processor = BadWords(CPU)
    processor.add_row(new_row(0, SamplingParams(bad_words_token_ids=words)))
    expected = lp.NoBadWordsLogitsProcessor(words)(torch.tensor([text]), logits())
    got = processor.apply(logits(), batch([0], len(text), token_ids=context(text)))
    assert torch.equal(got.isfinite(), expected.isfinite())


def test_a_bad_word_longer_than_the_context_does_not_match():
    """Positions before the first token match no bad word."""
    processor = BadWords(CPU)
    processor.add_row(new_row(0, SamplingParams(bad_words_token_ids=[[7, 7, 7, 9], [7, 11]])))
    for text, banned in (([7], [11]), ([7, 7], [11]), ([7, 7, 7], [9, 11])):
        got = processor.apply(logits(), batch([0], len(text), token_ids=context(text)))
        assert got.isinf().nonzero()[:, 1].tolist() == banned


@pytest.mark.parametrize("generated", range(5))
def test_min_tokens_equals_transformers(generated):
    processor = MinTokens(CPU)
    processor.add_row(new_row(0, SamplingParams(min_tokens=3), [1, 2], stop_ids=[5, 9]))
    reference = lp.MinNewTokensLengthLogitsProcessor(2, 3, [5, 9], device="cpu")
    expected = reference(torch.zeros(1, 2 + generated, dtype=torch.long), logits())
    assert torch.equal(processor.apply(logits(), batch([0], 2 + generated)), expected)


def test_only_allowed_tokens():
    processor = AllowedTokens(CPU)
    processor.add_row(new_row(1, SamplingParams(allowed_token_ids=[3, 7, 3])))
    got = processor.apply(logits(2), batch([0, 1]))
    assert torch.equal(got[0], logits(2)[0])
    assert got[1].isfinite().nonzero().flatten().tolist() == [3, 7]


def test_rows_without_processors_are_unchanged_beside_others():
    asks = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.5,
        logit_bias={3: 50.0},
        min_tokens=5,
        allowed_token_ids=[1, 2, 3],
        bad_words_token_ids=[[2]],
    )
    plain = SamplingParams(temperature=0.9, seed=4)
    together = Sampler(8, VOCAB, CPU)
    alone = Sampler(8, VOCAB, CPU)
    for row in range(4):
        together.add_row(new_row(row, asks if row % 2 else plain, stop_ids=[1]))
    alone.add_row(new_row(0, plain))
    for position in range(30):
        one = logits(1, position)
        got = together.sample(one.repeat(4, 1), batch([0, 1, 2, 3], position)).token_ids
        expected = alone.sample(one, batch([0], position)).token_ids
        assert got[0] == got[2] == expected[0] and got[1] == got[3] == 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(mode):
    params = SamplingParams(temperature=0.5, logprobs=-1, logit_bias={4: 10.0}, top_k=5, seed=1)
    sampler = Sampler(8, VOCAB, CPU, mode)
    sampler.add_row(new_row(0, params))
    found = sampler.sample(logits(), batch([0])).logprobs
    expected = logits()
    if mode.startswith("processed"):
        expected[0, 4] += 10
        expected /= 0.5
        expected[expected < expected.topk(5).values[0, -1]] = -torch.inf
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    assert found.token_ids.shape == (1, 1 + VOCAB)
    assert torch.allclose(found.logprobs[0], expected[0, found.token_ids[0]])
