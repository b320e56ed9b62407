"""Drafts that are drawn: whatever from, the text has the distribution of the target, by a chi-square test over 20,000
texts of three tokens. Seeds are fixed, so a result is the same each time."""

import functools

import pytest
import torch

from quire.sample.sampler import Sampler
from quire.spec_decode.sampled import SampledDrafts
from tests.spec_decode.sampling_cases import VOCAB, Case, Rows, chain, count_texts, p_value, probabilities, write_texts

NEAR = chain(1) + chain(2, 0.2)
ONE_TOKEN = torch.where(torch.arange(VOCAB) == 3, 20.0, 0.0).expand(VOCAB, VOCAB)
CASES = {
    "far": Case(),
    "near": Case(draft_chain=NEAR),
    "equal": Case(draft_chain=chain(1)),
    "one draft": Case(num_drafts=1),
    "five drafts": Case(num_drafts=5, draft_chain=NEAR),
    "nearly one token": Case(draft_chain=ONE_TOKEN),
    "rounded": Case(draft_chain=NEAR, dtype=torch.bfloat16),
    "cold": Case({"temperature": 0.5}, draft_chain=NEAR),
    "hot": Case({"temperature": 1.7}),
    "top-p": Case({"top_p": 0.7}, draft_chain=NEAR),
    "top-k": Case({"top_k": 2}),
    "min-p": Case({"min_p": 0.2, "temperature": 1.3}, draft_chain=NEAR),
    "penalties": Case({"presence_penalty": 0.6, "frequency_penalty": 0.9, "repetition_penalty": 1.3}, draft_chain=NEAR),
    "rewards": Case({"frequency_penalty": -0.8, "repetition_penalty": 0.8}),
    "all": Case({"temperature": 0.8, "top_p": 0.9, "top_k": 4, "presence_penalty": 0.7}, draft_chain=NEAR),
    "few tokens": Case(draft_chain=NEAR, draft_tokens=[5, 0, 3]),
    "few tokens, filtered": Case({"top_p": 0.8, "repetition_penalty": 1.4}, draft_tokens=[2, 4]),
}


@functools.cache
def texts_of(name):
    return write_texts(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_texts_have_the_distribution_of_the_target(name):
    case = CASES[name]
    texts, _ = texts_of(name)
    assert p_value(count_texts(texts), probabilities(case.params)) > 0.01


def test_the_test_notices_another_distribution():
    texts, _ = texts_of("far")
    assert p_value(count_texts(texts), probabilities({"temperature": 1.06})) < 1e-3
    assert p_value(count_texts(texts), probabilities({"presence_penalty": 0.1})) < 1e-3


def test_drafts_of_the_same_distribution_are_all_accepted():
    assert texts_of("equal")[1] == 1.0
    near, far = texts_of("near")[1], texts_of("far")[1]
    assert 0.85 < near < 1 and far < 0.6


def test_greedy_rows_get_the_likeliest_tokens():
    texts, _ = write_texts(Case({"temperature": 0.0}, draft_chain=NEAR), num_rows=5)
    token, wanted = 4, []
    for _ in range(3):
        token = int(chain(1)[token].argmax())
        wanted.append(token)
    assert texts.tolist() == [wanted] * 5


def test_more_than_can_be_kept_is_refused():
    with pytest.raises(ValueError, match=r"4 drafts x 4096 rows x 152000 tokens.*lower --max-num-seqs"):
        SampledDrafts(4096, 4, 152_000, torch.device("cpu"))


def test_rows_given_to_others_forget_their_drafts():
    """A draft that another request left in the row was not drawn for this one: it is a guess like any other."""
    kept, state = SampledDrafts(4, 2, VOCAB, torch.device("cpu")), Rows(4, "cpu")
    parameters = Sampler(4, VOCAB, torch.device("cpu")).parameters.device
    parameters.temperature[:] = 1
    rows = torch.tensor([0, 1, -1, 3])
    for j in range(2):
        state.token_ids[[0, 1, 3], 2 + j] = kept.draw(j, chain(3)[:4], rows, state, parameters)[[0, 1, 3]].int()
    kept.forget([1])
    state.num_tokens[3] += 1  # it went on without verifying them
    ahead, counts = torch.tensor([0, 1, 2] * 4), torch.full((12,), 2)
    drafts = kept.at(torch.arange(4).repeat_interleave(3), ahead, counts, state, parameters.greedy)
    first = state.token_ids[0, 2:4].tolist()
    assert drafts.tokens.tolist() == [*first, -1] + [-1] * 9
    assert torch.equal(drafts.logits[drafts.places[:2]], chain(3)[[0, 0]])
