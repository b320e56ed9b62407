"""Verification of drafts against a loop over rows, on any device: in the interpreter and on a GPU."""

from dataclasses import dataclass

import torch

from quire.kernels.accept_drafts import accept_drafts, accept_drafts_torch
from quire.kernels.accept_sampled import DrawnDrafts
from quire.kernels.sample_tokens import NO_TOKEN, Draw, sample_tokens, sample_tokens_torch
from quire.messages.sampling_params import SamplingParams
from tests.kernels.sampling_cases import parameters, random_logits


@dataclass
class Rows:
    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    num_computed: torch.Tensor
    token_limit: torch.Tensor


def random_case(seed: int, device: str, n: int = 9, most: int = 3):
    """Rows of all sorts: in their prompt, decoding with and without drafts, at their limit, padding."""
    g = torch.Generator().manual_seed(seed)
    num_rows = n + 4
    counts = torch.randint(1, most + 2, (n,), generator=g)
    rows = torch.randperm(num_rows, generator=g)[:n].int()
    known = torch.randint(1, 20, (num_rows,), generator=g)
    limit = known + torch.randint(0, most + 3, (num_rows,), generator=g)
    ids = torch.randint(0, 3, (num_rows, 40), generator=g).int()
    computed = known - 1
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        computed[row] += count
        if count == 1 and torch.rand((), generator=g) < 0.4:
            computed[row] = max(0, int(known[row]) - 3)
    rows[torch.rand(n, generator=g) < 0.2] = -1
    first = torch.zeros(n + 1, dtype=torch.int32)
    first[1:] = counts.cumsum(0)
    tokens = torch.randint(-1, 3, (int(first[-1]),), generator=g)
    state = Rows(*(t.to(device) for t in (ids, known, computed, limit)))
    return tokens.to(device), first.to(device), rows.to(device), state


def expected(tokens, first, rows, state, out, num_sampled) -> None:
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        drawn = tokens[first[i] : first[i + 1]].tolist()
        known, computed = int(state.num_tokens[row]), int(state.num_computed[row])
        kept = 0
        if computed == known + len(drawn) - 1:
            drafts = state.token_ids[row, known : known + len(drawn) - 1].tolist()
            kept = 1
            while kept < len(drawn) and drawn[kept - 1] == drafts[kept - 1]:
                kept += 1
            kept = max(0, min(kept, int(state.token_limit[row]) - known))
            for j in range(kept):
                state.token_ids[row, known + j] = max(0, drawn[j])
            state.num_tokens[row] = known + kept
            state.num_computed[row] = known + kept - 1
        out[i, : len(drawn)] = torch.tensor(drawn)
        num_sampled[i] = kept


def check(seed: int, device: str) -> None:
    for function in (accept_drafts_torch, accept_drafts):
        results = []
        for verify in (expected, function):
            tokens, first, rows, state = random_case(seed, device)
            out = torch.full((len(rows), 4), -7, dtype=torch.int32, device=device)
            num_sampled = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
            verify(tokens, first, rows, state, out, num_sampled)
            results.append((tokens, first, rows, state, out, num_sampled))
        (_, first, rows, wanted, out, counts), (*_, got, other_out, other_counts) = results
        assert torch.equal(counts, other_counts)
        for i in range(len(rows)):
            width = int(first[i + 1] - first[i])
            assert torch.equal(out[i, :width], other_out[i, :width])
        for name in ("token_ids", "num_tokens", "num_computed"):
            assert torch.equal(getattr(wanted, name), getattr(got, name)), name


def check_sampled(vocab: int, draft_vocab: int, draw: Draw, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Drafts drawn from a distribution near the target's: the same tokens as by torch. Every fourth position has none,
    one has no token to draw, and one a draft of no distribution."""
    n, num_rows = 80 if device != "cpu" or vocab < 100 else 32, 16
    filters = {"top_p": 0.9, "top_k": 40} if draw == Draw.WARPED else {}
    params = [SamplingParams(temperature=0.3 + 0.1 * row, **filters) for row in range(num_rows)]
    rows, positions = torch.arange(n, device=device) % num_rows, torch.arange(n, device=device) // num_rows + 5
    logits = random_logits(n, vocab, device, dtype)
    ids = None
    if draft_vocab < vocab:
        tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:draft_vocab].to(device)
        ids = torch.full((vocab,), -1, device=device)
        ids[tokens] = torch.arange(draft_vocab, device=device)
    else:
        tokens = torch.arange(vocab, device=device)
    places = torch.randperm(2 * n, generator=torch.Generator().manual_seed(2))[:n].to(device)
    draft_logits = torch.zeros(2 * n, draft_vocab, dtype=dtype, device=device)
    draft_logits[places] = logits[:, tokens] + random_logits(n, draft_vocab, device, dtype, 0.7, seed=3)
    by_row = parameters(params, device)
    drawn = tokens[sample_tokens_torch(draft_logits[places], rows, positions + 100, by_row, Draw.RANDOM)]
    drafts = DrawnDrafts(torch.where(rows % 4 > 0, drawn, -1), places, draft_logits, ids)
    logits[7] = float("nan")
    draft_logits[places[9]] = float("nan")  # of a broken checkpoint: nothing is accepted for it
    undrafted = sample_tokens_torch(logits, rows, positions, by_row, draw)
    drafts.tokens[9] = tokens[int(tokens[0] == undrafted[9])]
    wanted = sample_tokens_torch(logits, rows, positions, by_row, draw, drafts)
    got = sample_tokens(logits, rows, positions, by_row, draw, drafts)
    assert wanted[7] == got[7] == NO_TOKEN
    assert wanted[9] == got[9] == undrafted[9], (wanted[9], got[9], undrafted[9])
    # A number at a boundary may fall on either side: torch's cumulative sums on a GPU are not exact.
    other = (wanted != got).nonzero().flatten().tolist()
    assert len(other) <= (3 if device != "cpu" else 0), other
    accepted = (got == drafts.tokens).float().sum() / (drafts.tokens >= 0).sum()
    assert 0.2 * draft_vocab / vocab < accepted < 1, accepted
