"""The C kernels against their torch twins."""

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.paged_attention import paged_attention
from quire.kernels.rms_norm import fused_add_rms_norm_torch, rms_norm_torch
from quire.kernels.rope_and_write import rope_and_write_torch
from quire.kernels.silu_mul import silu_mul_torch
from tests.attention.mixes import MIXES, paged_batch

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

DTYPES = [torch.float32, torch.bfloat16]


def check_close(ours, wanted, dtype):
    exact = dtype is torch.float32
    torch.testing.assert_close(ours.float(), wanted.float(), atol=2e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 65), (70, 1024)])
def test_rms_norm(dtype, rows, width):
    x, residual, weight = torch.randn(2 * rows + 1, width).to(dtype).split((rows, rows, 1))
    weight = weight[0].contiguous()
    check_close(native.rms_norm(x, None, weight, 1e-6), rms_norm_torch(x, weight, 1e-6), dtype)
    wanted, total = fused_add_rms_norm_torch(x, residual, weight, 1e-6)
    stream = residual.clone()
    check_close(native.rms_norm(x, stream, weight, 1e-6), wanted, dtype)
    assert torch.equal(stream, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (40, 600)])
def test_silu_mul(dtype, rows, width):
    x = (torch.randn(rows, 2 * width) * 8).to(dtype)
    check_close(native.silu_mul(x), silu_mul_torch(x.clone()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 4, 24, 12), (6, 2, 96, 96)])
def test_rope_and_write(dtype, normed, heads, kv_heads, head_dim, rotary):
    tokens, blocks = 37, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.rand(64, rotary // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    positions, slots = torch.randint(0, 64, (tokens,)), torch.randperm(blocks * 16)[:tokens]
    weights = torch.randn(2, head_dim).to(dtype)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    caches = [torch.zeros(blocks, 2, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
    wanted = rope_and_write_torch(qkv, heads, norms, table, positions, caches[0], slots)
    check_close(native.rope_and_write(qkv, heads, norms, table, positions, caches[1], slots), wanted, dtype)
    check_close(caches[1], caches[0], dtype)


@pytest.mark.skipif(not native.has_linear(), reason="needs bf16 arithmetic")
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 64, 200])
@pytest.mark.parametrize(("k", "n"), [(576, 1536), (64, 32), (33, 7), (10, 50), (1024, 96)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows, k, n, with_bias):
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((rows, k), (n, k), (n,)))
    wanted = x.float() @ weight.float().T + (bias.float() if with_bias else 0)
    ours = native.linear(x, native.pack_linear(weight), n, bias if with_bias else None)
    torch.testing.assert_close(ours.float(), wanted, atol=1e-2 * k**0.5, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 6, 40, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (4, 4, 24), (6, 2, 128), (32, 1, 32)])
def test_attention(dtype, mix, window, heads, kv_heads, head_size):
    batch = paged_batch(MIXES[mix], 16, heads, kv_heads, head_size, dtype, window)
    ours = native.attention(*batch, head_size**-0.5, window)
    check_close(ours, paged_attention(*batch, head_size**-0.5, window), dtype)


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_attention_with_other_blocks(block_size):
    batch = paged_batch(MIXES["mixed"], block_size, 6, 2, 64, torch.bfloat16)
    check_close(native.attention(*batch, 0.125, None), paged_attention(*batch, 0.125, None), torch.bfloat16)


def test_one_thread_gives_the_same():
    batch = paged_batch(MIXES["long"], 16, 6, 2, 64, torch.bfloat16)
    several = native.attention(*batch, 0.125, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(native.attention(*batch, 0.125, None), several)
    finally:
        torch.set_num_threads(threads)


def test_random_shapes():
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows = [(int(rng.integers(0, 200)), int(rng.integers(1, 40))) for _ in range(rng.integers(1, 6))]
        batch = paged_batch(rows, 16, 6, 2, 64, torch.bfloat16)
        check_close(native.attention(*batch, 0.125, None), paged_attention(*batch, 0.125, None), torch.bfloat16)
