"""Kernels of `--batch-invariant` in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.invariant_linear import invariant_linear
from quire.kernels.paged_attention import AttentionFeatures, AttentionShape, paged_attention
from quire.kernels.skinny_linear import skinny_linear_torch
from quire.kernels.triton import invariant_attention as attention
from quire.kernels.triton import invariant_linear as kernel
from quire.kernels.triton.skinny_linear import SplitWorkspace

ROWS = (1, 2, 3, 17, 64, 200)
HEADS, KV, SIZE, BLOCK = 4, 2, 16, 16
LENGTH = 190  # keys of short parts, of long ones, and of the last
CHUNKS = [70, 1, 29, 1, 63, 24, 1, 1]
DECODED = [63, 1, 1, 64, 1, 58, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_the_same_bits_beside_any_others(rows, dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(200, 600, dtype=dtype), torch.randn(150, 600, dtype=dtype), torch.randn(150).to(dtype)
    whole = invariant_linear(x, weight, bias)
    wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(whole.float(), wanted, atol=5e-2, rtol=1e-2)
    assert torch.equal(invariant_linear(x[:rows], weight, bias), whole[:rows])
    assert torch.equal(invariant_linear(x[200 - rows :], weight, bias), whole[200 - rows :])  # elsewhere in a tile
    assert kernel.Slabs.of(150, 600).count == 2
    for split in (False, True):
        args = (x[:rows], weight, bias, None, None, False, False)
        assert torch.equal(kernel.invariant_linear(*args, few=False, split=split), whole[:rows])
    assert not SplitWorkspace.of(x.device).arrived.any()


@pytest.mark.parametrize(("outputs", "slabs"), [(40, 8), (100, 4), (200, 2), (400, 1)])
@pytest.mark.parametrize("inputs", [2048, 2000])
@pytest.mark.parametrize("fused", ["norm", "silu", "both", "residual"])
def test_fused_products_of_few_rows_have_the_bits_of_many(outputs, slabs, inputs, fused, monkeypatch):
    monkeypatch.setattr(kernel, "ENOUGH", 320 * (2 if fused in ("silu", "both") else 1))
    torch.manual_seed(0)
    rows, silu, dtype = 18, fused in ("silu", "both"), torch.float16
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs * (2 if silu else 1), inputs).to(dtype) / 30
    norm = (torch.rand(inputs) + 0.5, 1e-6) if fused in ("norm", "both") else None
    residual = torch.randn(rows, outputs).to(dtype) if fused == "residual" else None
    assert kernel.Slabs.of(len(weight), inputs).count == slabs
    many = invariant_linear(x, weight, norm=norm, residual=residual, silu=silu)
    wanted = skinny_linear_torch(x.float(), weight.float(), norm=norm, residual=residual, silu=silu)
    torch.testing.assert_close(many.float(), wanted, atol=2e-2, rtol=1e-2)
    for first, count in ((0, 1), (3, 2), (4, 4), (9, 1)):
        few = slice(first, first + count)
        own = None if residual is None else residual[few].contiguous()
        args = (x[few], weight, None, norm, own, silu, False)
        for is_few in (True, False):
            assert torch.equal(kernel.invariant_linear(*args, few=is_few), many[few]), (first, count, is_few)


FEATURES = {
    "plain": {},
    "window": {"window": 90},
    "softcap": {"softcap": 5.0},
    "alibi": {"slopes": torch.linspace(0.01, 0.1, HEADS)},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """The interpreter is slow, but for float32, whose tiles are of 16 keys, all parts should be met."""
    for name, value in (("SHORT", 64), ("COUNT", 2), ("LONG", 64)):
        monkeypatch.setitem(attention._invariant_kernel.fn.__globals__, name, attention.tl.constexpr(value))
    monkeypatch.setattr(attention, "MAX_PARTS", 4)


def attend(q, cache, table, features, chunks, splits=None):
    """Queries of one row in chunks of these sizes."""
    space = attention.PartsWorkspace(2, [AttentionShape(HEADS, KV, SIZE)], q.device)
    queries = attention.queries_per_block(HEADS // KV, q.dtype)
    out, done = torch.empty_like(q), 0
    for size in chunks:
        part, got = q[done : done + size].contiguous(), torch.empty_like(q[done : done + size])
        done += size
        rows, lengths = torch.zeros(1, dtype=torch.int32), torch.tensor([done], dtype=torch.int32)
        if size == 1:
            batch = (rows, None, lengths, table, space, features)
            attention.invariant_attention(part, got, cache, None, *batch, splits=splits)
        else:
            starts = torch.tensor([0, size], dtype=torch.int32)
            blocks = torch.tensor([[0, first] for first in range(0, size, queries)], dtype=torch.int32)
            batch = (rows, starts, lengths, table, space, features)
            attention.invariant_attention(part, got, cache, blocks, *batch, queries=queries)
        out[done - size : done] = got
    assert not space.arrived.any()
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", FEATURES)
def test_a_query_has_the_same_bits_in_any_chunk(name, dtype):
    torch.manual_seed(1)
    blocks = -(-LENGTH // BLOCK)
    q = torch.randn(LENGTH, HEADS, SIZE).to(dtype)
    cache = torch.randn(blocks, 2, KV, BLOCK, SIZE).to(dtype)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    features = AttentionFeatures(SIZE**-0.5, **FEATURES[name])
    whole = attend(q, cache, table, features, [LENGTH])
    rows, starts = torch.zeros(1, dtype=torch.int32), torch.tensor([0, LENGTH])
    wanted = paged_attention(q, cache, rows, starts, torch.tensor([LENGTH]), table, features)
    torch.testing.assert_close(whole, wanted, atol=1e-2 if dtype is torch.float16 else 1e-4, rtol=1e-2)
    chunked = attend(q, cache, table, features, CHUNKS)
    assert torch.equal(chunked, whole)
    for splits in (1, 3):
        decoded = attend(q, cache, table, features, DECODED, splits)
        assert torch.equal(decoded, whole), splits


def test_padding_rows_stay_finite():
    space = attention.PartsWorkspace(2, [AttentionShape(HEADS, KV, SIZE)], torch.device("cpu"))
    q = torch.randn(2, HEADS, SIZE)
    out, cache = torch.full_like(q, float("nan")), torch.randn(1, 2, KV, BLOCK, SIZE)
    rows, lengths, table = torch.tensor([0, -1]), torch.tensor([3, 0]), torch.zeros(1, 1, dtype=torch.int32)
    attention.invariant_attention(q, out, cache, None, rows, None, lengths, table, space, AttentionFeatures(0.25))
    assert out.isfinite().all()
