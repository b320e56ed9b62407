"""A KV cache in int8 with a scale per token and head, in the CPU backends: written, read, and against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch

from quire.attention.base import Angles, StepInputs
from quire.attention.native import NativeBackend
from quire.attention.torch import TorchBackend
from quire.kernels import native
from quire.kernels.kv_scales import KVScales, dequantized
from quire.kernels.native.replay import Recording
from quire.kernels.paged_attention import AttentionShape, paged_attention
from quire.kernels.rope_and_write import rope_and_write_torch
from tests.attention.mixes import MIXES, filled_cache, make_features, paged_batch, scaled_cache

SHAPES = [(4, 4, 24), (6, 2, 64), (9, 3, 128), (8, 1, 256), (10, 2, 32)]
NATIVE = None if native.library() is None else NativeBackend([AttentionShape(*shape) for shape in SHAPES])
BACKENDS = [TorchBackend()] if NATIVE is None else [TorchBackend(), NATIVE]


def int8_batch(mix, block_size, heads, kv_heads, head_size, dtype, window=None, features=""):
    """A batch over a quantized cache, and the features of a layer with its scales."""
    q, cache, *rows = paged_batch(MIXES[mix], block_size, heads, kv_heads, head_size, dtype, window)
    cache, scales = filled_cache(cache, torch.int8)
    layer_features = make_features(features, heads, head_size**-0.5, window)
    return (q, cache, *rows), replace(layer_features, kv_scales=scales)


def attend(backend, batch, layer_features):
    q, cache, rows, starts, lens, table = batch
    step = StepInputs(rows, len(q), starts, lens, bool((starts.diff() == 1).all()))
    return backend.attend(q, cache, backend.build(step, table, cache.shape[3]), layer_features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_attention_equals_the_reference(dtype, heads, kv_heads, head_size):
    limit = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    cases = [(mix, window, "") for mix, window in itertools.product(MIXES, (None, 6))] + [("mixed", None, "all")]
    for mix, window, features in cases:
        batch, layer_features = int8_batch(mix, 16, heads, kv_heads, head_size, dtype, window, features)
        wanted = paged_attention(*batch, layer_features)
        for backend in BACKENDS:
            ours = attend(backend, batch, layer_features)
            where = f"{backend.name}, {mix}, window {window}: "
            torch.testing.assert_close(ours.float(), wanted.float(), **limit, msg=lambda m, w=where: w + m)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("dtype", "head_size", "rotary"), [(torch.float32, 24, 8), (torch.bfloat16, 64, 64)])
def test_what_is_written_times_its_scale_is_what_was_given(backend, dtype, head_size, rotary):
    heads, kv_heads, blocks, tokens = 6, 2, 5, 37
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size).to(dtype)
    angles = Angles(torch.randn(30, rotary).to(dtype), torch.randint(0, 30, (tokens,)))
    slots = torch.randperm(blocks * 16)[:tokens]
    plain = torch.zeros(blocks, 2, kv_heads, 16, head_size)
    wanted = rope_and_write_torch(qkv.float(), heads, None, angles.table.float(), angles.positions, plain, slots)
    cache, scales = scaled_cache(tuple(plain.shape), torch.int8, "cpu")
    step = StepInputs(
        torch.zeros(1).long(), tokens, torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), False
    )
    metadata = backend.build(step, torch.zeros(1, 8).int(), 16)
    q = backend.write(qkv, heads, None, angles, cache, slots, metadata, scales)
    limit = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(q.float(), wanted, atol=limit, rtol=limit)
    found = dequantized(cache, torch.arange(blocks), scales, torch.float32)
    most = plain.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    error = float(((found - plain).abs() / most).max())
    assert 0 < error < 0.51 / 127 + (0.02 if dtype is torch.bfloat16 else 0)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_shared_keys_and_replayed_calls():
    batch, layer_features = int8_batch("decode", 16, 6, 2, 64, torch.bfloat16)
    q, cache, rows, starts, lens, table = batch
    table[rows, :2] = table[rows[-1], :2].clone()  # the first 32 keys are those of all rows
    lens = lens.clamp(min=40)
    table[rows, 2] = torch.arange(1, len(rows) + 1).int()
    batch = (q, cache, rows, starts, lens.clamp(max=48), table)
    wanted = paged_attention(*batch, layer_features)
    ours = native.attention(*batch, layer_features, shared=32)
    torch.testing.assert_close(ours.float(), wanted.float(), atol=2e-2, rtol=2e-2)
    metadata = NATIVE.build(StepInputs(rows, len(q), starts, batch[4], decode_only=True), table, 16)
    with Recording(len(q)) as recording:
        out = NATIVE.attend(q, cache, metadata, layer_features)
    recording.replayed()(len(q), len(q), 0)
    torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_scales_of_layers_are_not_for_the_c_kernels():
    batch, layer_features = int8_batch("decode", 16, 6, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="allowed: int8, a scale per token"):
        native.attention(*batch, replace(layer_features, kv_scales=KVScales(0.5, 0.5)))
