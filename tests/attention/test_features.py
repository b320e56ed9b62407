"""Soft-cap, ALiBi and sinks in the CPU backends, against the reference."""

import itertools

import pytest
import torch

from quire.attention.base import StepInputs
from quire.attention.native import NativeBackend
from quire.attention.torch import TorchBackend
from quire.kernels import native
from quire.kernels.native.replay import Recording
from quire.kernels.paged_attention import AttentionShape, paged_attention
from tests.attention.mixes import FEATURES, MIXES, make_features, paged_batch

SHAPES = [(4, 4, 24), (6, 2, 64), (3, 3, 96), (8, 1, 256), (71, 1, 64)]
NATIVE = None if native.library() is None else NativeBackend([AttentionShape(*shape) for shape in SHAPES])
BACKENDS = [TorchBackend()] if NATIVE is None else [TorchBackend(), NATIVE]


def attend(backend, batch, layer_features):
    q, cache, rows, starts, lens, table = batch
    step = StepInputs(rows, len(q), starts, lens, bool((starts.diff() == 1).all()))
    return backend.attend(q, cache, backend.build(step, table, cache.shape[3]), layer_features)


@pytest.mark.parametrize("features", ["", *FEATURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_equals_the_reference(features, dtype, heads, kv_heads, head_size):
    limit = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for mix, window in itertools.product(MIXES, (None, 6, 40)):
        if mix == "long" and heads > 8:
            continue  # slow, and covered by other cases
        batch = paged_batch(MIXES[mix], 16, heads, kv_heads, head_size, dtype, window)
        layer_features = make_features(features, heads, head_size**-0.5, window)
        wanted = paged_attention(*batch, layer_features)
        for backend in BACKENDS:
            ours = attend(backend, batch, layer_features)
            where = f"{backend.name}, {mix}, window {window}: "
            torch.testing.assert_close(ours.float(), wanted.float(), **limit, msg=lambda m, w=where: w + m)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_sink_takes_all_weight_or_none(backend):
    batch = paged_batch(MIXES["mixed"], 16, 4, 2, 32, torch.float32)
    layer_features = make_features("sinks", 4, 0.2)
    layer_features.sinks[:] = torch.tensor([100.0, -100, 100, -100])
    ours = attend(backend, batch, layer_features)
    assert ours[:, ::2].abs().max() < 1e-6
    torch.testing.assert_close(ours[:, 1::2], paged_attention(*batch, make_features("", 4, 0.2))[:, 1::2])


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_a_replayed_call_has_all_of_it():
    batch = paged_batch(MIXES["decode"], 16, 6, 2, 64, torch.bfloat16)
    layer_features, backend = make_features("all", 6, 0.125), NATIVE
    q, cache, rows, starts, lens, table = batch
    metadata = backend.build(StepInputs(rows, len(q), starts, lens, decode_only=True), table, 16)
    wanted = backend.attend(q, cache, metadata, layer_features)
    with Recording(len(q)) as recording:
        out = backend.attend(q, cache, metadata, layer_features)
    out.zero_()
    recording.replayed()(len(q), len(rows), 0)
    assert torch.equal(out, wanted)
    layer_features.sinks.add_(3)  # as another checkpoint loaded into the same memory would
    recording.replayed()(len(q), len(rows), 0)
    assert torch.equal(out, backend.attend(q, cache, metadata, layer_features)) and not torch.equal(out, wanted)
