"""Sampling kernels against float64 and their torch references, on any device: in the interpreter and on a GPU."""

from dataclasses import dataclass

import torch

from quire.kernels.apply_bitmask import apply_bitmask, apply_bitmask_torch
from quire.kernels.apply_penalties import apply_penalties, apply_penalties_torch
from quire.kernels.gather_logprobs import gather_logprobs, gather_logprobs_torch
from quire.kernels.philox import philox_uniform
from quire.kernels.sample_tokens import NO_TOKEN, Draw, DrawParameters, sample_and_append, sample_tokens
from quire.kernels.triton import keep_threshold as keep_kernel
from quire.kernels.triton import sample_tokens as sample_kernel
from quire.messages.sampling_params import SamplingParams

CLOSE = 2e-5  # float32 sums; a share this close to a boundary may fall on either side
INF = float("inf")

WARPS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=5, temperature=0.3),
    SamplingParams(top_k=40, top_p=0.9, temperature=1.5),
    SamplingParams(top_k=2**31 - 1, top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95, temperature=0.7),
    SamplingParams(top_p=0.999, temperature=3.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0, temperature=2.0),
    SamplingParams(min_p=0.02, top_p=0.8),
    SamplingParams(min_p=0.3, top_k=50, top_p=0.9),
    SamplingParams(top_k=300, min_p=1e-4, temperature=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=1e4),
]


def parameters(params: list[SamplingParams], device: str) -> DrawParameters:
    """Row r has params[r] and the seed 1000 + r."""
    return DrawParameters(
        seeds=torch.arange(1000, 1000 + len(params), device=device),
        temperature=torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=device),
        log_min_p=torch.tensor([0.0 if p.greedy else p.min_p for p in params], device=device).log(),
        top_p=torch.tensor([1.0 if p.greedy else p.top_p for p in params], device=device),
        top_k=torch.tensor([0 if p.greedy else p.top_k for p in params], dtype=torch.int32, device=device),
        greedy=torch.tensor([int(p.greedy) for p in params], dtype=torch.int32, device=device),
    )


def random_logits(n: int, vocab: int, device: str, dtype=torch.float32, spread: float = 3.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, vocab, generator=generator) * spread).to(device, dtype)


def threshold(x: torch.Tensor, params: SamplingParams, lean: float) -> float:
    """The lowest logit kept, in float64. Lean > 0 keeps a little more, lean < 0 a little less."""
    scaled = x / params.temperature
    shares = (scaled - scaled.max()).exp()
    kept = shares >= min(1.0, params.min_p * (1 - lean))
    if 0 < params.top_k < len(x):
        kept &= x >= x.masked_fill(~kept, -INF).topk(params.top_k).values[-1]
    if params.top_p < 1:
        shares = shares.masked_fill(~kept, 0.0)
        ordered, order = x.masked_fill(~kept, -INF).sort(descending=True)
        reached = shares[order].cumsum(0) >= (params.top_p + lean) * shares.sum()
        if reached.any():
            return float(ordered[reached.int().argmax()])
    return float(x[kept].min())


def check_thresholds(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """Row i of the logits has params[i]."""
    n, vocab = logits.shape
    device = str(logits.device)
    by_row = parameters(params, device)
    rows = torch.arange(n, device=device)
    piece = sample_kernel.piece_size(vocab, Draw.WARPED)
    largest, sums = sample_kernel.piece_stats(logits, rows, by_row.temperature, piece, True)
    floors = keep_kernel.keep_threshold(logits, rows, largest, sums, by_row, piece).tolist()
    for x, one, floor in zip(logits.double(), params, floors, strict=True):
        if one.greedy:
            assert floor == -INF
            continue
        kept = x >= floor
        must, may = x >= threshold(x, one, -CLOSE), x >= threshold(x, one, CLOSE)
        assert bool((kept | ~must).all()) and bool((may | ~kept | (x == -INF)).all()), (one, floor, int(kept.sum()))


def check_token(x: torch.Tensor, params: SamplingParams, uniform: float, token: int) -> None:
    """x [vocab] float64: the token is the one that the uniform number points at, or beside a boundary."""
    if params.greedy:
        assert token == int(x.argmax())
        return
    verdicts = []
    for lean in (-CLOSE, CLOSE):
        kept = x >= threshold(x, params, lean)
        shares = (x / params.temperature).masked_fill(~kept, -INF).softmax(0)
        cumulative = shares.cumsum(0)
        below, above = float(cumulative[token] - shares[token]), float(cumulative[token])
        verdicts.append(bool(shares[token] > 0) and below - CLOSE <= uniform <= above + CLOSE)
    assert any(verdicts), (params, token, uniform, below, above)


def check_draws(logits: torch.Tensor, params: list[SamplingParams], draw: Draw, position: int = 7) -> None:
    n = len(logits)
    device = str(logits.device)
    by_row = parameters(params, device)
    rows = torch.arange(n, device=device)
    positions = torch.full((n,), position, device=device)
    before = logits.clone()
    tokens = sample_tokens(logits, rows, positions, by_row, draw)
    assert torch.equal(logits, before)
    uniform = philox_uniform(by_row.seeds, positions).tolist()
    for x, one, u, token in zip(logits.double(), params, uniform, tokens.tolist(), strict=True):
        check_token(x, one, u, token)


@dataclass
class Rows:
    """As the worker's row state."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    num_computed: torch.Tensor


def some_rows(num_tokens: list[int], num_computed: list[int], max_len: int, device: str) -> Rows:
    return Rows(
        torch.full((len(num_tokens), max_len), 9, dtype=torch.int32, device=device),
        torch.tensor(num_tokens, device=device),
        torch.tensor(num_computed, device=device),
    )


def check_appended(device: str, draw: Draw, dtype: torch.dtype, vocab: int) -> None:
    """A full table, a row in the middle of its prompt, NaN, no possible token, and padding that changes nothing."""
    params = [SamplingParams(temperature=0.8, top_p=0.9) if draw >= Draw.WARPED else SamplingParams()] * 6
    if draw == Draw.GREEDY:
        params = [SamplingParams(temperature=0)] * 6
    by_row = parameters(params, device)
    logits = random_logits(8, vocab, device, dtype)
    logits[2, vocab // 2] = float("nan")
    logits[4] = -INF
    rows = torch.tensor([5, 3, 1, -1, 0, 2, -1, -1], dtype=torch.int32, device=device)
    state = some_rows([4, 3, 6, 5, 2, 1], [4, 3, 6, 2, 2, 1], 6, device)
    alone = sample_tokens(logits, rows.clamp(min=0), state.num_tokens[rows.clamp(min=0).long()], by_row, draw)
    out = torch.full((8,), -7, dtype=torch.int32, device=device)
    sample_and_append(logits, rows, state, by_row, draw, out)
    out = out.tolist()
    assert out[2] == out[4] == NO_TOKEN and out[3] == out[6] == out[7] == -7
    for place in (0, 1, 5):
        assert out[place] == int(alone[place]) and 0 <= out[place] < vocab
    assert state.num_tokens.tolist() == [5, 4, 7, 5, 2, 2]
    expected = torch.full((6, 6), 9, dtype=torch.int32)
    expected[5, 1], expected[1, 3], expected[0, 4], expected[2, 5] = out[0], 0, 0, out[5]
    assert torch.equal(state.token_ids.cpu(), expected)


def check_penalties(device: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    in_prompt = (torch.rand(4, vocab, generator=generator) < 0.2).to(device)
    counts = torch.randint(-5, 4, (4, vocab), generator=generator).clamp(min=0).int().to(device)
    strength = torch.tensor([[1.3, 0.5, -0.2], [0.7, 0.0, 1.0], [1.0, -1.5, 0.0], [1.1, 0.1, 0.1]], device=device)
    places, slots = torch.tensor([0, 2, 3], device=device), torch.tensor([2, 0, 1], device=device)
    expected = random_logits(5, vocab, device)
    expected[3, ::5] = -INF
    got = expected.clone()
    plain = expected.clone()
    apply_penalties_torch(expected, places, slots, in_prompt, counts, strength)
    apply_penalties(got, places, slots, in_prompt, counts, strength)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    drafts = torch.tensor([[5, -1, -1], [-1, -1, -1], [vocab - 1, 3, 3]], dtype=torch.int32, device=device)
    counted = counts.clone()
    for slot, token, count in ((2, 5, 1), (1, vocab - 1, 1), (1, 3, 2)):
        counted[slot, token] += count
    ahead, got = plain.clone(), plain.clone()
    apply_penalties(ahead, places, slots, in_prompt, counts, strength, drafts)
    apply_penalties(got, places, slots, in_prompt, counted, strength)
    assert torch.equal(got, ahead) and not torch.equal(got, expected)


def check_bitmask(device: str, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).int().to(device)
    places = torch.tensor([3, 1], device=device)
    expected = random_logits(4, vocab, device, dtype)
    got = expected.clone()
    apply_bitmask_torch(expected, words, places)
    apply_bitmask(got, words, places)
    assert torch.equal(got, expected)
    assert got[0].isfinite().all() and 0.3 < got[1].isfinite().float().mean() < 0.7
    bits = [int(words[0, t // 32]) >> (t % 32) & 1 for t in range(vocab)] if vocab < 5000 else None
    assert bits is None or got[3].isfinite().int().tolist() == bits


def check_logprobs(device: str, n: int, vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(n, vocab, device, dtype)
    logits[0, : vocab // 2] = -INF
    chosen = torch.arange(n, device=device) * (vocab - 1) // max(1, n - 1)
    got, expected = gather_logprobs(logits, chosen), gather_logprobs_torch(logits, chosen)
    assert torch.equal(got.chosen, expected.chosen) and torch.equal(got.ranks, expected.ranks)
    torch.testing.assert_close(got.logsumexp, expected.logsumexp, rtol=2e-6, atol=2e-6)
