"""The sampling kernels at real size, on their own and replayed in a graph."""

import pytest
import torch

from quire.kernels.sample_tokens import NO_TOKEN, Draw, sample_tokens, sample_tokens_torch
from quire.messages.sampling_params import SamplingParams
from quire.sample.sampler import Sampler
from tests.kernels import draft_cases
from tests.sample.rows import new_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 151936
PARAMS = {
    Draw.GREEDY: [SamplingParams(temperature=0)],
    Draw.RANDOM: [SamplingParams(temperature=t) for t in (1.0, 0.0, 0.6, 2.0, 1e4)],
}


@pytest.fixture(scope="module")
def cases():
    """Imported late: it brings Triton, which a machine without a GPU need not have."""
    from tests.kernels import sampling_cases

    return sampling_cases


def asked(cases, draw: Draw, n: int) -> list[SamplingParams]:
    choices = PARAMS.get(draw, cases.WARPS)
    return [choices[i % len(choices)] for i in range(n)]


@pytest.mark.parametrize("n", [1, 7, 256])
@pytest.mark.parametrize("draw", Draw)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws(cases, n, draw, dtype):
    cases.check_draws(cases.random_logits(n, VOCAB, "cuda", dtype, spread=2.5), asked(cases, draw, n), draw)


@pytest.mark.parametrize("vocab", [32000, 50257, 262144])
def test_draws_of_other_vocabularies(cases, vocab):
    for draw in Draw:
        cases.check_draws(cases.random_logits(20, vocab, "cuda", torch.bfloat16), asked(cases, draw, 20), draw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0, 12.0])
def test_thresholds(cases, dtype, spread):
    """From a flat distribution, where every piece is a candidate, to a peaked one."""
    cases.check_thresholds(cases.random_logits(len(cases.WARPS), VOCAB, "cuda", dtype, spread), cases.WARPS)


@pytest.mark.parametrize("draw", Draw)
def test_tokens_equal_the_reference_nearly_always(cases, draw):
    """A number close to a boundary may fall on its other side."""
    n = 256
    logits = cases.random_logits(n, VOCAB, "cuda", torch.bfloat16, spread=4.0)
    by_row = cases.parameters(asked(cases, draw, n), "cuda")
    rows = torch.arange(n, device="cuda")
    got = sample_tokens(logits, rows, rows, by_row, draw)
    assert (got == sample_tokens_torch(logits, rows, rows, by_row, draw)).float().mean() > 0.97


@pytest.mark.parametrize("draw", Draw)
def test_a_token_depends_neither_on_the_batch_nor_on_the_run(cases, draw):
    n = 256
    logits = cases.random_logits(n, VOCAB, "cuda", torch.bfloat16)
    by_row = cases.parameters(asked(cases, draw, n), "cuda")
    rows = torch.arange(n, device="cuda")
    together = sample_tokens(logits, rows, rows, by_row, draw)
    for _ in range(5):
        assert torch.equal(sample_tokens(logits, rows, rows, by_row, draw), together)
    for some in (slice(0, 1), slice(5, 12), slice(100, 180)):
        assert torch.equal(sample_tokens(logits[some], rows[some], rows[some], by_row, draw), together[some])


@pytest.mark.parametrize("draw", [Draw.RANDOM, Draw.WARPED])
def test_draws_follow_the_distribution(cases, draw):
    """Chi-square: with at most 4 degrees of freedom chance passes 35 less than once in a million."""
    shares = torch.tensor([0.3, 0.0, 0.22, 0.2, 0.18, 0.1])
    params, expected = SamplingParams(), shares
    if draw == Draw.WARPED:
        params, expected = SamplingParams(top_k=4), torch.tensor([0.3, 0.0, 0.22, 0.2, 0.18, 0.0]) / 0.9
    draws = 20_000
    logits = shares.log().expand(draws, -1).contiguous().cuda()
    rows = torch.zeros(draws, dtype=torch.int32, device="cuda")
    tokens = sample_tokens(logits, rows, torch.arange(draws, device="cuda"), cases.parameters([params], "cuda"), draw)
    seen, possible = torch.bincount(tokens.cpu(), minlength=6), expected > 0
    assert not seen[~possible].any()
    assert ((seen - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum() < 35


@pytest.mark.parametrize("draw", Draw)
def test_tokens_are_appended(cases, draw):
    cases.check_appended("cuda", draw, torch.bfloat16, VOCAB)


def test_the_other_kernels(cases):
    cases.check_penalties("cuda", VOCAB)
    for dtype in (torch.float32, torch.bfloat16):
        cases.check_bitmask("cuda", VOCAB, dtype)
        cases.check_logprobs("cuda", 40, VOCAB, dtype)


@pytest.mark.parametrize("draw", Draw)
@torch.inference_mode()
def test_replayed_in_a_graph_with_other_rows(cases, draw):
    """Captured once, padded; parameters, rows, logits and state change between replays."""
    bucket, num_rows, max_len = 16, 32, 64
    sampler = Sampler(num_rows, VOCAB, torch.device("cuda"))
    logits = cases.random_logits(bucket, VOCAB, "cuda", torch.bfloat16)
    rows = torch.full((bucket,), -1, dtype=torch.int32, device="cuda")
    out = torch.full((bucket,), -7, dtype=torch.int32, device="cuda")
    state = cases.some_rows([5] * num_rows, [5] * num_rows, max_len, "cuda")
    sampler.sample_fused(logits, rows, state, draw, out)  # compiles; padding alone changes nothing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample_fused(logits, rows, state, draw, out)
    assert state.num_tokens.tolist() == [5] * num_rows and out.tolist() == [-7] * bucket

    for replay in range(6):
        n = 3 + 2 * replay
        used = [(7 * i + replay) % num_rows for i in range(n)]
        for row, params in zip(used, asked(cases, draw, n), strict=True):
            sampler.remove_row(row)
            new = new_row(row, params)
            new.seed = 100 * replay + row
            sampler.add_row(new)
        features = sampler.choose_draw(used)
        assert features is not None and features <= draw
        logits.copy_(cases.random_logits(bucket, VOCAB, "cuda", torch.bfloat16, seed=replay))
        logits[1, 77] = float("nan")
        rows.fill_(-1)
        rows[:n] = torch.tensor(used, dtype=torch.int32)
        known = state.num_tokens.clone()
        state.num_computed.copy_(known)
        state.num_computed[used[2]] -= 1
        own = rows[:n].long()
        eager = sample_tokens(logits[:n], own, known[own], sampler.parameters.device, draw).tolist()
        graph.replay()
        got = out.tolist()
        assert got[:n] == eager and got[1] == NO_TOKEN and min(eager[:1] + eager[2:]) >= 0
        for i, row in enumerate(used):
            kept = i != 2
            assert int(state.num_tokens[row]) == int(known[row]) + kept
            assert not kept or int(state.token_ids[row, known[row]]) == max(0, eager[i])
        others = [row for row in range(num_rows) if row not in used]
        assert torch.equal(state.num_tokens[others], known[others])


@pytest.mark.parametrize("seed", range(12))
def test_accepted_drafts(seed):
    draft_cases.check(seed, "cuda")
