"""The paged backend against dense attention over each row's whole history."""

import pytest
import torch

from quire.attention.base import StepInputs
from quire.attention.pages import similar_lengths
from quire.attention.torch import TorchBackend
from quire.kernels.paged_attention import AttentionFeatures

HEAD = 16


def dense(q, k, v, window, causal=True):
    """q [T, H, D] are the last T of L positions; k, v [L, KV, D]."""
    length, group = len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) * HEAD**-0.5
    at, key = torch.arange(length - len(q), length)[:, None], torch.arange(length)
    visible = ((key <= at) | (not causal)) & ((key > at - window) if window else True)
    return torch.einsum("htl,lhd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def run_paged(rows, block_size, heads, kv_heads, window, seed=0, padding=0, gap=0, causal=True):
    """rows: (cached, new) -> (paged outputs, dense outputs), both over all new tokens."""
    torch.manual_seed(seed)
    backend = TorchBackend()
    lens = [cached + new for cached, new in rows]
    per_row = [-(-n // block_size) for n in lens]
    ids = (torch.randperm(sum(per_row)) + 1).split(per_row)
    # Stale but finite data everywhere, and an entry past a row's end that must never be read.
    page = 2 * kv_heads * block_size * HEAD
    pages = torch.randn(sum(per_row) + 1, page + gap) * 50
    cache = pages[:, :page].unflatten(1, (2, kv_heads, block_size, HEAD))
    beyond = pages[:, page:].clone()
    table = torch.full((len(rows), max(per_row)), -1, dtype=torch.int32)
    q, k, v, slots, wanted = [], [], [], [], []
    for row, ((cached, _), length) in enumerate(zip(rows, lens, strict=True)):
        history_k, history_v = torch.randn(length, kv_heads, HEAD), torch.randn(length, kv_heads, HEAD)
        table[row, : per_row[row]] = ids[row]
        blocks, offsets = ids[row][torch.arange(length) // block_size], torch.arange(length) % block_size
        cache[blocks[:cached], 0, :, offsets[:cached]] = history_k[:cached]
        cache[blocks[:cached], 1, :, offsets[:cached]] = history_v[:cached]
        if window:  # blocks wholly outside the window have been freed
            table[row, : max(0, cached - window + 1) // block_size] = 0
        queries = torch.randn(length - cached, heads, HEAD)
        wanted.append(dense(queries, history_k, history_v, window, causal))
        q.append(queries)
        k.append(history_k[cached:])
        v.append(history_v[cached:])
        slots.append((blocks * block_size + offsets)[cached:])
    pad = [torch.zeros(padding, n, HEAD) for n in (heads, kv_heads, kv_heads)]
    slots.append(torch.zeros(padding, dtype=torch.long))
    starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).int()
    decode_only = all(new == 1 for _, new in rows)
    step = StepInputs(torch.arange(len(rows)), int(starts[-1]), starts, torch.tensor(lens).int(), decode_only)
    metadata = backend.build(step, table, block_size)
    qkv = torch.cat([torch.cat([*part, padded]) for part, padded in zip((q, k, v), pad, strict=True)], dim=1)
    queries = backend.write(qkv.flatten(1), heads, None, None, cache, torch.cat(slots), metadata)
    out = backend.attend(queries, cache, metadata, AttentionFeatures(HEAD**-0.5, window, causal=causal))
    assert torch.equal(pages[:, page:], beyond)
    return out, torch.cat(wanted)


MIXES = {
    "decode": [(0, 1), (5, 1), (40, 1), (16, 1), (15, 1)],
    "prompts": [(0, 20), (0, 2), (33, 7), (16, 16)],
    "mixed": [(31, 1), (0, 9), (64, 1), (10, 3), (3, 1), (7, 25)],
    "long": [(0, 300), (140, 150), (700, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_equals_dense_attention(mix, block_size, window, heads, kv_heads):
    ours, wanted = run_paged(MIXES[mix], block_size, heads, kv_heads, window)
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


def test_padding_tokens_stay_finite_and_change_no_row():
    ours, wanted = run_paged(MIXES["mixed"], 16, 6, 2, None, padding=5)
    torch.testing.assert_close(ours[:-5], wanted, atol=2e-5, rtol=1e-4)
    assert ours[-5:].isfinite().all()


def test_many_ragged_rows_are_split_and_still_right():
    rows = [(7 * n % 900, 1) for n in range(48)]
    assert len(similar_lengths(sorted((-(-(c + 1) // 16) for c, _ in rows), reverse=True), 16, 2)) > 1
    ours, wanted = run_paged(rows, 16, 6, 2, None)
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


def test_equal_rows_stay_together():
    assert similar_lengths([4] * 32, 16, 2) == [(0, 32)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mix", MIXES)
def test_pages_with_gaps_between_them(mix, window):
    ours, wanted = run_paged(MIXES[mix], 4, 4, 2, window, gap=3)
    torch.testing.assert_close(ours[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_queries_that_see_later_keys(mix):
    ours, wanted = run_paged(MIXES[mix], 4, 4, 2, None, causal=False)
    torch.testing.assert_close(ours[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_padding_are_left_out(causal):
    starts, lens = torch.tensor([0, 1, 200]).int(), torch.zeros(2).int()
    step = StepInputs(torch.tensor([-1, -1]), 200, starts, lens, decode_only=False)
    backend, cache = TorchBackend(), torch.randn(3, 2, 2, 4, HEAD)
    metadata = backend.build(step, torch.ones(2, 2, dtype=torch.int32), 4)
    out = backend.attend(torch.randn(200, 4, HEAD), cache, metadata, AttentionFeatures(1.0, causal=causal))
    assert out.shape == (200, 4, HEAD) and not out.any()
