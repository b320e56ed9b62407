"""Sampling kernels on small vocabularies, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.philox import philox_uniform
from quire.kernels.sample_tokens import Draw, sample_tokens
from quire.messages.sampling_params import SamplingParams
from quire.sample.logprobs import token_logprobs
from quire.sample.sampler import Sampler
from tests.kernels import sampling_cases as cases
from tests.sample.rows import batch, new_row


def test_uniform_numbers_are_philox():
    """With v equal logits the token is the uniform number times v, rounded down."""
    vocab, n = 1 << 14, 6
    by_row = cases.parameters([SamplingParams()] * n, "cpu")
    by_row.seeds[:] = torch.tensor([0, 1, -5, 2**63 - 1, -(2**63), 987654321987])
    positions = torch.tensor([0, 1, 2**32 + 5, 77, 3, 2**40])
    got = sample_tokens(torch.zeros(n, vocab), torch.arange(n), positions, by_row, Draw.RANDOM)
    assert got.tolist() == (philox_uniform(by_row.seeds, positions) * vocab).long().tolist()


@pytest.mark.parametrize("vocab", [3, 1024, 2500])
@pytest.mark.parametrize("spread", [0.1, 20.0])
def test_draws(vocab, spread):
    for temperatures in ([0.0, 0.0], [0.0, 0.2, 1.0, 30.0]):
        params = [SamplingParams(temperature=t) for t in temperatures]
        draw = Draw.RANDOM if any(temperatures) else Draw.GREEDY
        cases.check_draws(cases.random_logits(len(params), vocab, "cpu", spread=spread), params, draw)


@pytest.mark.parametrize("vocab", [3, 1500])
def test_draws_from_what_is_kept(vocab):
    cases.check_draws(cases.random_logits(len(cases.WARPS), vocab, "cpu"), cases.WARPS, Draw.WARPED)


@pytest.mark.parametrize(
    ("vocab", "dtype", "spread"),
    [(50, torch.float32, 0.05), (1024, torch.float16, 4.0), (2500, torch.bfloat16, 0.05), (2500, torch.float32, 4.0)],
)
def test_thresholds(vocab, dtype, spread):
    """bfloat16 and a small spread mean ties by the dozen."""
    cases.check_thresholds(cases.random_logits(len(cases.WARPS), vocab, "cpu", dtype, spread), cases.WARPS)


def test_thresholds_where_little_is_possible():
    logits = cases.random_logits(len(cases.WARPS), 1300, "cpu")
    logits[:, 3:1290] = -cases.INF
    cases.check_draws(logits, cases.WARPS, Draw.WARPED)
    logits[:, 1:] = -cases.INF
    cases.check_draws(logits[:4], cases.WARPS[3:7], Draw.WARPED)


@pytest.mark.parametrize("shift", [0.0, -200.0])
def test_thresholds_of_equal_logits_and_of_zeros_of_either_sign(shift):
    logits = torch.zeros(8, 200) + shift
    logits[:4, ::2] *= -1
    logits[:4, 100:] -= 5
    cases.check_thresholds(logits, cases.WARPS[2:6] * 2)


def test_greedy_takes_the_first_of_equal_maxima():
    logits = cases.random_logits(3, 3000, "cpu").clamp(max=2.0)
    by_row = cases.parameters([SamplingParams(temperature=0)] * 3, "cpu")
    for draw in Draw:
        got = sample_tokens(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64), by_row, draw)
        assert torch.equal(got, logits.argmax(1)) and (logits == 2.0).sum() > 100


@pytest.mark.parametrize("draw", Draw)
def test_tokens_are_appended(draw):
    cases.check_appended("cpu", draw, torch.bfloat16, 1100)


def test_draws_follow_the_distribution():
    """Chi-square over many positions: with 4 degrees of freedom chance passes 28 once in 100,000."""
    shares = torch.tensor([0.3, 0.0, 0.22, 0.2, 0.18, 0.1])
    draws = 400
    by_row = cases.parameters([SamplingParams()], "cpu")
    logits, rows = shares.log().expand(draws, -1).contiguous(), torch.zeros(draws, dtype=torch.int64)
    tokens = sample_tokens(logits, rows, torch.arange(draws), by_row, Draw.RANDOM)
    seen = torch.bincount(tokens, minlength=6)
    assert not seen[1]
    assert ((seen - draws * shares) ** 2 / (draws * shares).clamp(min=1e-9)).sum() < 28


def test_fused_and_eager_sampling_agree():
    """Rows beside one that cannot be fused sample what they sample alone."""
    wants = [SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=0), SamplingParams(top_p=0.8, seed=4)]
    sampler = Sampler(8, 600, torch.device("cpu"))
    for row, params in enumerate(wants):
        sampler.add_row(new_row(row, params))
    sampler.add_row(new_row(3, SamplingParams(logit_bias={5: 60.0}, seed=2)))
    assert sampler.choose_draw([1]) == Draw.GREEDY and sampler.choose_draw([1, 0]) == Draw.RANDOM
    assert sampler.choose_draw([2, 1]) == Draw.WARPED and sampler.choose_draw([1, 3]) is None
    for position in range(3):
        logits = cases.random_logits(4, 600, "cpu", seed=position)
        state = cases.some_rows([position] * 8, [position] * 8, 16, "cpu")
        out = torch.empty(3, dtype=torch.int32)
        sampler.sample_fused(logits[:3], torch.arange(3), state, Draw.WARPED, out)
        eager = sampler.sample(logits, batch([0, 1, 2, 3], position)).token_ids
        assert eager.tolist() == [*out.tolist(), 5]
        assert state.token_ids[:3, position].tolist() == out.tolist()


@pytest.mark.parametrize("vocab", [37, 3000])
def test_penalties(vocab):
    cases.check_penalties("cpu", vocab)


@pytest.mark.parametrize("vocab", [31, 64, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitmask(vocab, dtype):
    cases.check_bitmask("cpu", vocab, dtype)


@pytest.mark.parametrize("vocab", [40, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(vocab, dtype):
    cases.check_logprobs("cpu", 4, vocab, dtype)


@pytest.mark.parametrize("as_logits", [False, True])
def test_token_logprobs(as_logits):
    logits, chosen = cases.random_logits(4, 300, "cpu"), torch.tensor([0, 5, 299, 17])
    got = token_logprobs(logits, chosen, 6, as_logits)
    values = logits if as_logits else logits.log_softmax(1)
    assert torch.equal(got.token_ids, torch.cat([chosen[:, None], values.topk(6).indices], 1))
    torch.testing.assert_close(got.logprobs, values.gather(1, got.token_ids))
    assert got.ranks.tolist() == ((values > values.gather(1, chosen[:, None])).sum(1) + 1).tolist()
