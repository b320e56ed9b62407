"""Latent attention: absorbed, expanded and in C, against attention with keys and values of each head written out."""

from dataclasses import replace

import pytest
import torch

from quire.attention.base import Angles, StepInputs
from quire.attention.indexed import not_selected
from quire.attention.latent import LatentFeatures, LatentWeights, TorchLatentBackend, attend_absorbed, attend_expanded
from quire.attention.latent_native import NativeLatentBackend
from quire.kernels import native
from quire.kernels.kv_scales import KVScales

PAGE = 16
NATIVE = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def make_weights(heads, nope, rank, v, dtype=torch.float32) -> LatentWeights:
    rows = torch.randn(heads * (nope + v), rank).mul(rank**-0.5).to(dtype)
    w_uk, w_uv = rows.split((heads * nope, heads * v))
    return LatentWeights(rows, w_uk.unflatten(0, (heads, -1)), w_uv.unflatten(0, (heads, -1)))


def written_out(q, latents, weights, features):
    """q [T, H, nope + rope] of the last T of latents [L, rank + rope], in float64."""
    q, latents = q.double(), latents.double()
    compressed, shared = latents[:, : features.rank], latents[:, features.rank :]
    keys = torch.einsum("hnr,lr->lhn", weights.w_uk.double(), compressed)
    keys = torch.cat((keys, shared[:, None].expand(-1, q.shape[1], -1)), dim=-1)
    values = torch.einsum("hvr,lr->lhv", weights.w_uv.double(), compressed)
    scores = torch.einsum("thd,lhd->htl", q, keys) * features.scale
    first = len(latents) - len(q)
    later = torch.arange(len(latents)) > torch.arange(first, len(latents))[:, None]
    return torch.einsum("htl,lhv->thv", scores.masked_fill(later, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("attend", [attend_absorbed, attend_expanded])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 700), (5, 40), (130, 2100)])
def test_both_forms_are_attention(attend, queries, keys):
    torch.manual_seed(0)
    features = LatentFeatures(0.3, rank=24, nope=12, rope=8, v=20, interleaved=True)
    weights = make_weights(3, 12, 24, 20)
    q, latents = torch.randn(queries, 3, 20), torch.randn(keys, 32)
    expected = written_out(q, latents, weights, features)
    torch.testing.assert_close(attend(q, latents, weights, features).double(), expected, atol=1e-5, rtol=1e-5)


class Step:
    """Rows of (queries, keys), with what earlier steps wrote to their pages."""

    def __init__(self, rows, sizes, heads, dtype, interleaved=True):
        torch.manual_seed(0)
        nope, rank, rope, v = sizes
        self.features = LatentFeatures((nope + rope) ** -0.5, rank, nope, rope, v, interleaved)
        self.weights = make_weights(heads, nope, rank, v, dtype)
        queries, keys = zip(*rows, strict=True)
        pages = [-(-each // PAGE) for each in keys]
        order = torch.randperm(sum(pages)).int() + 1
        self.table = torch.zeros(len(rows) + 1, max(pages), dtype=torch.int32)
        for i, part in enumerate(order.split(pages)):
            self.table[i + 1, : pages[i]] = part
        self.cache = torch.randn(sum(pages) + 1, PAGE, rank + rope).to(dtype)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.inputs = StepInputs(
            rows=torch.arange(len(rows)) + 1,
            num_tokens=sum(queries),
            query_start=starts,
            seq_lens=torch.tensor(keys, dtype=torch.int32),
            decode_only=max(queries) == 1,
        )
        positions = [torch.arange(k - q, k) for q, k in rows]
        self.positions = torch.cat(positions)
        self.slots = torch.cat([self.table[i + 1, p // PAGE].long() * PAGE + p % PAGE for i, p in enumerate(positions)])
        wide = torch.randn(sum(queries), heads * (nope + rope) + rank + rope).to(dtype)  # as one product gives them
        self.q = wide[:, : heads * (nope + rope)].unflatten(-1, (heads, -1))
        self.kv = wide[:, heads * (nope + rope) :]
        self.norm = (torch.rand(rank) + 0.5, 1e-6)
        angles = torch.rand(max(keys), rope // 2) * 6
        self.angles = Angles(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), self.positions)

    def run(self, backend):
        cache, q, kv = self.cache.clone(), self.q.clone(), self.kv.clone()
        weights = backend.prepare(self.weights)
        metadata = backend.build(self.inputs, self.table, PAGE)
        backend.write(q, kv, self.norm, self.angles, cache, self.slots, metadata, self.features)
        return q, cache, backend.attend(q, weights, cache, metadata, self.features)


def test_pages_are_written_and_read():
    step = Step([(1, 40), (3, 3), (70, 100)], (12, 24, 8, 20), 3, torch.float32)
    q, cache, out = step.run(TorchLatentBackend())
    starts = step.inputs.query_start.tolist()
    for i, keys in enumerate(step.inputs.seq_lens.tolist()):
        latents = cache[step.table[i + 1, : -(-keys // PAGE)].long()].flatten(0, 1)[:keys]
        mine = slice(starts[i], starts[i + 1])
        expected = written_out(q[mine], latents, step.weights, step.features)
        torch.testing.assert_close(out[mine].double(), expected, atol=1e-5, rtol=1e-5)
    kv = step.kv[:, :24]
    normed = kv * (kv.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * step.norm[0]
    torch.testing.assert_close(cache.flatten(0, 1)[step.slots][:, :24], normed)


def test_tokens_that_verify_drafts_may_be_rows_of_their_own():
    step = Step([(3, 40), (3, 19), (3, 3)], (12, 24, 8, 20), 3, torch.float32)
    _, _, expected = step.run(TorchLatentBackend())
    rows, lens = step.inputs.rows.repeat_interleave(3), (step.positions + 1).int()
    step.inputs = replace(step.inputs, rows=rows, seq_lens=lens, decode_only=True)
    torch.testing.assert_close(step.run(TorchLatentBackend())[2], expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_pairs(interleaved):
    step = Step([(4, 9)], (12, 24, 8, 20), 2, torch.float32, interleaved)
    q, cache, _ = step.run(TorchLatentBackend())
    cos, sin = step.angles.table[step.positions].chunk(2, dim=-1)
    turn = torch.complex(cos, sin)
    for before, after in (
        (step.q[:, 1, 12:], q[:, 1, 12:]),
        (step.kv[:, 24:], cache.flatten(0, 1)[step.slots][:, 24:]),
    ):
        pairs = [x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).mT for x in (before, after)]
        old, new = (torch.view_as_complex(x.contiguous()) for x in pairs)
        torch.testing.assert_close(new, old * turn)


@NATIVE
@pytest.mark.parametrize("sizes, heads", [((12, 24, 8, 20), 3), ((64, 256, 32, 64), 5), ((128, 512, 64, 128), 16)])
def test_c_equals_torch(sizes, heads):
    rows = [(1, 1), (1, 40), (1, 1500), (3, 3), (7, 300), (50, 180), (1, 64), (100, 130)]
    step = Step(rows, sizes, heads, torch.bfloat16)
    backend = NativeLatentBackend(heads, sizes[1] + sizes[2])
    q, cache, out = step.run(TorchLatentBackend())
    q_c, cache_c, out_c = step.run(backend)
    torch.testing.assert_close(q_c, q, atol=0.02, rtol=0.02)
    torch.testing.assert_close(cache_c, cache, atol=0.02, rtol=0.02)
    torch.testing.assert_close(out_c, out, atol=0.03, rtol=0.03)


@NATIVE
def test_bits_in_c_do_not_depend_on_the_other_rows():
    sizes, heads = (128, 512, 64, 128), 16
    rows = [(1, 1500), (5, 70), (1, 30)]
    _, _, together = Step(rows, sizes, heads, torch.bfloat16).run(NativeLatentBackend(heads, 576))
    step = Step(rows, sizes, heads, torch.bfloat16)
    step.inputs = StepInputs(step.inputs.rows[:1], 1, step.inputs.query_start[:2], step.inputs.seq_lens[:1], True)
    step.q, step.kv, step.slots = step.q[:1], step.kv[:1], step.slots[:1]
    step.angles = Angles(step.angles.table, step.positions[:1])
    _, _, alone = step.run(NativeLatentBackend(heads, 576))
    assert torch.equal(alone[0], together[0])


@NATIVE
def test_nan_stays_in_its_row():
    step = Step([(1, 40), (1, 40), (2, 40)], (64, 256, 32, 64), 4, torch.bfloat16)
    step.kv[1] = torch.nan
    _, _, out = step.run(NativeLatentBackend(4, 288))
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("by_token", [True, False])
def test_cache_in_fp8(by_token):
    step = Step([(1, 40), (70, 100)], (12, 24, 8, 20), 3, torch.float32)
    *_, exact = step.run(TorchLatentBackend())
    scales = torch.full(step.cache.shape[:2], 0.01) if by_token else None
    step.cache = (step.cache / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    step.features = replace(step.features, kv_scales=KVScales(k=1.0 if by_token else 0.01, by_token=scales))
    *_, out = step.run(TorchLatentBackend())
    assert (out - exact).norm() < 0.1 * exact.norm()


def test_the_index_takes_the_earlier_of_equal_scores():
    scores = torch.tensor([[0.0, 2, 0, -1, 0, 1], [0, 0, 0, 0, -torch.inf, -torch.inf]])
    for padded in (scores, torch.cat((scores, torch.full((2, 500), -torch.inf)), 1)):
        assert [(~row).nonzero()[:, 0].tolist() for row in not_selected(padded, 4)] == [[0, 1, 2, 5], [0, 1, 2, 3]]
