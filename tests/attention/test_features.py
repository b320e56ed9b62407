"""Soft-cap, ALiBi and sinks in the backends of a CPU, against plain attention."""

import itertools

import pytest
import torch

from quire.attention.base import StepInputs
from quire.attention.cpu import TorchBackend
from quire.attention.native import NativeBackend
from quire.kernels import native
from quire.kernels.native.replay import Recording
from quire.kernels.paged_attention import AttentionShape, paged_attention
from tests.attention.mixes import FEATURES, MIXES, paged_batch, scoring_with

SHAPES = [(4, 4, 24), (6, 2, 64), (3, 3, 96), (8, 1, 256), (71, 1, 64)]
NATIVE = None if native.library() is None else NativeBackend([AttentionShape(*shape) for shape in SHAPES])
BACKENDS = [TorchBackend()] if NATIVE is None else [TorchBackend(), NATIVE]


def attend(backend, batch, scoring):
    q, cache, rows, starts, lens, table = batch
    step = StepInputs(rows, len(q), starts, lens, bool((starts.diff() == 1).all()))
    return backend.attend(q, cache, backend.build(step, table, cache.shape[3]), scoring)


@pytest.mark.parametrize("features", ["", *FEATURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), SHAPES)
def test_equals_plain_attention(features, dtype, heads, kv_heads, head_size):
    limit = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for mix, window in itertools.product(MIXES, (None, 6, 40)):
        if mix == "long" and heads > 8:
            continue  # seconds, and nothing new
        batch = paged_batch(MIXES[mix], 16, heads, kv_heads, head_size, dtype, window)
        scoring = scoring_with(features, heads, head_size**-0.5, window)
        wanted = paged_attention(*batch, scoring)
        for backend in BACKENDS:
            ours = attend(backend, batch, scoring)
            where = f"{backend.name}, {mix}, window {window}: "
            torch.testing.assert_close(ours.float(), wanted.float(), **limit, msg=lambda m, w=where: w + m)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_sink_takes_all_weight_or_none(backend):
    batch = paged_batch(MIXES["mixed"], 16, 4, 2, 32, torch.float32)
    scoring = scoring_with("sinks", 4, 0.2)
    scoring.sinks[:] = torch.tensor([100.0, -100, 100, -100])
    ours = attend(backend, batch, scoring)
    assert ours[:, ::2].abs().max() < 1e-6
    torch.testing.assert_close(ours[:, 1::2], paged_attention(*batch, scoring_with("", 4, 0.2))[:, 1::2])


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_a_replayed_call_has_all_of_it():
    batch = paged_batch(MIXES["decode"], 16, 6, 2, 64, torch.bfloat16)
    scoring, backend = scoring_with("all", 6, 0.125), NATIVE
    q, cache, rows, starts, lens, table = batch
    metadata = backend.build(StepInputs(rows, len(q), starts, lens, one_each=True), table, 16)
    wanted = backend.attend(q, cache, metadata, scoring)
    with Recording(len(q)) as recording:
        out = backend.attend(q, cache, metadata, scoring)
    out.zero_()
    recording.replayed()(len(q), len(rows), 0)
    assert torch.equal(out, wanted)
    scoring.sinks.add_(3)  # as another checkpoint loaded into the same memory would
    recording.replayed()(len(q), len(rows), 0)
    assert torch.equal(out, backend.attend(q, cache, metadata, scoring)) and not torch.equal(out, wanted)
