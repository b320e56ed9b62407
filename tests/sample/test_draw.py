"""The draw by itself: fused with the append, and for rows without a possible token."""

import pytest
import torch

from quire.kernels.sample_tokens import NO_TOKEN, Draw, draw_from, draw_torch
from quire.messages.sampling_params import SamplingParams
from quire.sample.sampler import Sampler
from tests.sample.rows import batch, new_row

CPU = torch.device("cpu")
VOCAB = 60


class Rows:
    """As the worker's row state."""

    def __init__(self, num_tokens, num_computed, max_len):
        self.token_ids = torch.full((len(num_tokens), max_len), 9, dtype=torch.int32)
        self.num_tokens = torch.tensor(num_tokens)
        self.num_computed = torch.tensor(num_computed)


def sampler(*params: SamplingParams) -> Sampler:
    made = Sampler(8, VOCAB, CPU)
    for row, one in enumerate(params):
        made.add_row(new_row(row, one))
    return made


def logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


WANTS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(seed=1),
    "warped": SamplingParams(top_k=3, top_p=0.9, min_p=0.01, temperature=0.5, seed=2),
    "penalties": SamplingParams(temperature=0, presence_penalty=1.0),
    "logprobs": SamplingParams(seed=3, logprobs=2),
}


@pytest.mark.parametrize("want", WANTS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_possible_token_fails_alone(want, broken):
    s = sampler(*[WANTS[want]] * 3)
    one = logits(3)
    if broken == -float("inf"):
        one[1] = broken
    else:
        one[1, 20] = broken
    sampled = s.sample(one, batch([0, 1, 2]))
    fine = sampler(*[WANTS[want]] * 3).sample(logits(3), batch([0, 1, 2]))
    assert sampled.token_ids[1] == NO_TOKEN
    assert sampled.token_ids[[0, 2]].tolist() == fine.token_ids[[0, 2]].tolist()


def test_the_draw_chosen_for_a_batch():
    rows = list(WANTS)
    s = sampler(*WANTS.values())
    features = {name: s.choose_draw([rows.index(name), 0]) for name in rows}
    assert features == {
        "greedy": Draw.GREEDY,
        "random": Draw.RANDOM,
        "warped": Draw.WARPED,
        "penalties": None,
        "logprobs": None,
    }
    assert s.choose_draw([0, 2, 1]) == Draw.WARPED
    s.remove_row(3)
    s.add_row(new_row(3, SamplingParams(temperature=0)))
    assert s.choose_draw([3]) == Draw.GREEDY


def test_fused_sampling_equals_sampling_then_appending():
    s = sampler(WANTS["greedy"], WANTS["random"], WANTS["warped"])
    one = logits(4)
    expected = s.sample(one[[0, 2, 3]], batch([2, 0, 1], 3)).token_ids.tolist()
    state = Rows([3, 3, 3, 5], [3, 2, 3, 5], 8)
    out = torch.full((4,), -7, dtype=torch.int32)
    s.sample_fused(one, torch.tensor([2, -1, 0, 1]), state, Draw.WARPED, out)
    assert out.tolist() == [expected[0], -7, *expected[1:]]
    assert state.num_tokens.tolist() == [4, 3, 4, 5]
    assert state.token_ids[:, 3].tolist() == [expected[1], 9, expected[0], 9]


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 3000, 150_000])
def test_draws_in_c_are_those_of_torch(vocab):
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(40, vocab, generator=generator) * 3
    x[1::2] = x[1::2].masked_fill(torch.rand(20, vocab, generator=generator) < 0.6, -float("inf"))
    x[:, vocab // 2] = 1.0
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    uniform[:2], uniform[2:4] = 0.0, 1 - 2.0**-53
    shares = x.double().softmax(dim=1).cumsum(dim=1)
    for i, token in enumerate(draw_from(x, uniform).tolist()):
        assert x[i, token] > -float("inf")
        before = float(shares[i, token - 1]) if token else 0.0
        assert before - 1e-5 <= uniform[i] <= float(shares[i, token]) + 1e-5
    assert (draw_from(x, uniform) == draw_torch(x, uniform)).float().mean() > 0.9
