import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.messages.sampling_params import SamplingParams
from quire.sample.sampler import Sampler
from quire.sample.warpers import keep_threshold
from tests.properties import examples
from tests.sample.rows import batch, new_row

CPU = torch.device("cpu")
VOCAB = 300


def sampler(*params: SamplingParams, processors=()) -> Sampler:
    made = Sampler(8, VOCAB, CPU, processors=processors)
    for row, one in enumerate(params):
        made.add_row(new_row(row, one))
    return made


def logits(rows=1, vocab=VOCAB, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def possible(params: SamplingParams, one: torch.Tensor, draws=400) -> set[int]:
    """The tokens sampled at many positions."""
    s = sampler(params)
    return {int(s.sample(one.clone(), batch([0], p)).token_ids[0]) for p in range(draws)}


def transformers_warped(one: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same parameters through transformers' warpers, in our order."""
    from transformers.generation import logits_process as lp

    warpers = [lp.TemperatureLogitsWarper(params.temperature)]
    if params.min_p:
        warpers.append(lp.MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(lp.TopPLogitsWarper(params.top_p))
    for warper in warpers:
        one = warper(torch.zeros(1, 1, dtype=torch.long), one)
    return one


def at_the_edge(one: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Tokens of which rounding decides whether they are in the nucleus: those likelier add up to nearly top_p.
    transformers adds from the least likely up, we from the likeliest down."""
    warped = transformers_warped(one.double(), params.replace(top_p=1.0))[0]
    probabilities = warped.softmax(-1)
    likelier = torch.stack([probabilities[probabilities > p].sum() for p in probabilities])
    return (likelier - params.top_p).abs() < 1e-5


@settings(max_examples=examples(150))
@example(temperature=1.1245890782932226, top_k=0, top_p=0.999, min_p=0.0, seed=1)
@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, -1, 1, 5, 299, 300, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_possible_tokens_equal_transformers(temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    one = logits(seed=seed)
    s = sampler(params)
    ours = one.clone()
    for processor in s.processors:
        if processor.active:
            ours = processor.apply(ours, batch([0]))
    expected = transformers_warped(one.clone(), params)
    differs = ours.isfinite() != expected.isfinite()
    if differs.any():
        assert (at_the_edge(one, params) | ~differs).all()
    else:
        assert torch.allclose(ours.softmax(-1), expected.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_threshold_over_a_large_vocabulary_equals_a_full_sort(vocab):
    """More tokens than candidates: rows whose nucleus is wider are sorted in full."""
    one = torch.cat([logits(1, vocab, 1, 0.01), logits(1, vocab, 2, 5.0), logits(1, vocab, 3, 1.0)])
    top_k, top_p = torch.tensor([0, 0, 2000]), torch.tensor([0.9, 0.9, 0.99])
    least = keep_threshold(one, top_k, top_p)
    for row in range(3):
        expected = transformers_warped(
            one[row : row + 1], SamplingParams(top_k=int(top_k[row]), top_p=float(top_p[row]))
        )
        assert torch.equal(one[row] >= least[row], expected[0].isfinite())


def kept(params: SamplingParams, one: torch.Tensor) -> list[int]:
    s = sampler(params)
    for processor in s.processors:
        if processor.active:
            one = processor.apply(one, batch([0]))
    return one[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"top_k": 2}, [0, 1, 2, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.6}, [0, 1, 2, 3]),
        ({"top_p": 0.95}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 0.25}, [0, 1, 2, 3]),
        ({"min_p": 0.0625}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 1.0}, [0]),
    ],
)
def test_tokens_as_likely_as_the_last_one_kept_are_kept(asked, tokens):
    odds = torch.tensor([[16.0, 4.0, 4.0, 4.0, 1.0, 1.0] + [1e-4] * (VOCAB - 6)])
    assert kept(SamplingParams(temperature=1.0, **asked), odds.log()) == tokens


@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_the_nucleus_is_the_tokens_with_less_than_top_p_before_them(top_p, vocab):
    """docs/sampling.md; sums are of float32, so tokens within 1e-5 of the edge are not checked."""
    for seed in range(10):
        one = logits(vocab=vocab, seed=seed)
        least = keep_threshold(one, torch.tensor([0]), torch.tensor([top_p]))
        passed = one[0] >= least
        probabilities, order = one[0].double().softmax(-1).sort(descending=True)
        before = probabilities.cumsum(0) - probabilities
        assert passed[order][before < top_p - 1e-5].all() and not passed[order][before > top_p + 1e-5].any()
        assert passed[order[0]]


def test_more_tokens_may_tie_than_there_are_candidates():
    one = torch.zeros(3, 5000)
    one[1, 3000:] = -1.0
    one[2, 0] = 7.45  # 0.3 of all that tie for place 7, but 0.6 of as many as there are candidates
    one[2, 4000:] = -50.0
    least = keep_threshold(one, torch.tensor([7, 7, 7]), torch.tensor([1.0, 0.5, 0.5]))
    assert (one >= least.unsqueeze(1)).sum(1).tolist() == [5000, 3000, 4000]


def test_greedy_rows_take_the_argmax_beside_random_ones():
    one = logits(3)
    s = sampler(SamplingParams(temperature=0), SamplingParams(temperature=2.0, seed=5), SamplingParams(temperature=0))
    tokens = s.sample(one.clone(), batch([0, 1, 2])).token_ids
    assert tokens[0] == one[0].argmax() and tokens[2] == one[2].argmax()


def test_a_draw_depends_on_seed_and_position_alone():
    one = logits(1)
    params = [SamplingParams(temperature=1.5, seed=i) for i in range(4)]
    s = sampler(*params)
    together = [s.sample(one.repeat(4, 1), batch([0, 1, 2, 3], p)).token_ids.tolist() for p in range(20)]
    for row in range(4):
        alone = sampler(params[row])
        assert [int(alone.sample(one.clone(), batch([0], p)).token_ids[0]) for p in range(20)] == [
            t[row] for t in together
        ]
    assert len({tuple(t[row] for t in together) for row in range(4)}) == 4


def test_draws_follow_the_distribution():
    one = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]]))
    s = sampler(SamplingParams(temperature=1.0, seed=3))
    tokens = torch.cat([s.sample(one.clone(), batch([0], p)).token_ids for p in range(4000)])
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert shares[1] == 0 and torch.allclose(shares, one.exp()[0], atol=0.03)


def test_a_removed_row_leaves_no_parameters_behind():
    s = sampler(
        SamplingParams(temperature=5.0, top_k=2, min_p=0.5, logprobs=3, frequency_penalty=2, allowed_token_ids=[5])
    )
    s.remove_row(0)
    s.add_row(new_row(0, SamplingParams(temperature=1.0, seed=1)))
    fresh = sampler(SamplingParams(temperature=1.0, seed=1))
    for p in range(50):
        got, expected = (x.sample(logits(seed=p), batch([0], p)) for x in (s, fresh))
        assert got.token_ids.tolist() == expected.token_ids.tolist() and got.logprobs is None


def test_logprobs_are_of_the_raw_logits_with_the_sampled_token_first():
    one = logits(2)
    s = sampler(SamplingParams(temperature=3.0, logprobs=4, seed=9), SamplingParams(temperature=0))
    sampled = s.sample(one.clone(), batch([0, 1]))
    assert sampled.logprobs is not None and sampled.places == [0]
    raw = one[0].log_softmax(-1)
    ids, values = sampled.logprobs.token_ids[0], sampled.logprobs.logprobs[0]
    assert ids[0] == sampled.token_ids[0] and torch.allclose(values, raw[ids])
    assert ids[1:].tolist() == raw.topk(4).indices.tolist()
    assert sampled.logprobs.ranks[0] == (raw > raw[ids[0]]).sum() + 1


class OnlyEven:
    """A user's processor."""

    changes_argmax = True
    active = True

    def add_row(self, new): ...

    def remove_row(self, row): ...

    def sampled(self, token_ids, batch): ...

    def apply(self, logits, batch):
        logits[:, 1::2] = -torch.inf
        return logits


def test_users_processors_see_all_rows_greedy_or_not():
    s = sampler(SamplingParams(temperature=0), SamplingParams(temperature=2.0), processors=[OnlyEven()])
    for p in range(50):
        assert not (s.sample(logits(2, seed=p), batch([0, 1], p)).token_ids % 2).any()


def test_top_k_one_is_greedy():
    assert possible(SamplingParams(temperature=2.0, top_k=1), logits()) == {int(logits().argmax())}
