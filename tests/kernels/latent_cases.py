"""Kernels of latent attention against dense attention and the backend in torch, on whichever device."""

from dataclasses import replace

import numpy as np
import torch

from quire.attention.base import Angles, StepInputs
from quire.attention.latent import LatentFeatures, LatentWeights, TorchLatentBackend, read_latents
from quire.attention.latent_triton import TritonLatentBackend
from quire.kernels.kv_scales import KVScales, quantize_vectors
from quire.messages.kv_cache import LatentSpec
from quire.worker.cache_pages import page_views
from tests.kernels.kernel_cases import check_close

MIXES = {
    "decode": [(0, 1), (5, 1), (40, 1), (16, 1), (15, 1), (130, 1)],
    "prompts": [(0, 20), (0, 2), (33, 7), (16, 16)],
    "mixed": [(31, 1), (0, 9), (64, 1), (10, 3), (3, 1), (7, 25)],
    "long": [(0, 150), (70, 80), (300, 1)],
}
# Heads, rank, rope, nope and v of models, and small ones for the interpreter.
SHAPES = {
    "V2-Lite": (16, 512, 64, 128, 128),
    "V3": (128, 512, 64, 128, 128),
    "MiniCPM3": (40, 256, 32, 64, 64),
    "small": (4, 32, 16, 16, 16),
    "uneven": (6, 48, 8, 24, 20),
}
Shape = tuple[int, int, int, int, int]


def make_layer(shape: Shape, dtype: torch.dtype, device: str) -> tuple[LatentWeights, LatentFeatures]:
    heads, rank, rope, nope, v = shape
    kv_b = (torch.randn(heads * (nope + v), rank, device=device) * rank**-0.5).to(dtype)
    w_uk, w_uv = kv_b.split((heads * nope, heads * v))
    weights = LatentWeights(kv_b, w_uk.unflatten(0, (heads, nope)), w_uv.unflatten(0, (heads, v)))
    return weights, LatentFeatures((nope + rope) ** -0.5, rank, nope, rope, v, interleaved=False)


def filled_pages(latents: torch.Tensor, dtype: torch.dtype, scales: str) -> tuple[torch.Tensor, KVScales | None]:
    """latents [pages, tokens, width] -> a cache, in pages as the engine lays them out."""
    pages, size, width = latents.shape
    if scales != "token":
        return (latents / 2).to(dtype) if scales else latents.to(dtype), KVScales(2.0, 2.0) if scales else None
    spec = LatentSpec(size, width - 1, 1, str(dtype).removeprefix("torch."), scale_dtype="float32")
    raw = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8, device=latents.device)
    cache, by_token = page_views(raw, spec)
    stored, by_vector = quantize_vectors(latents, dtype)
    cache.copy_(stored)
    by_token.copy_(by_vector)
    return cache, KVScales(by_token=by_token)


def dense(q, latents, weights, features):
    """The queries [T, H, nope + rope] of the last T of latents [L, rank + rope], in float64."""
    compressed, rope = latents.double().split((features.rank, features.rope), dim=-1)
    keys = torch.einsum("lr,hnr->lhn", compressed, weights.w_uk.double())
    keys = torch.cat((keys, rope[:, None].expand(-1, q.shape[1], -1)), -1)
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) * features.scale
    last = torch.arange(len(latents) - len(q), len(latents), device=q.device)[:, None]
    scores = scores.masked_fill(torch.arange(len(latents), device=q.device) > last, -torch.inf)
    return torch.einsum("htl,lr,hvr->thv", scores.softmax(-1), compressed, weights.w_uv.double())


def check_latent_attention(
    mix: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    shape: Shape = SHAPES["small"],
    page_tokens: int = 16,
    prefix: int = 0,
    padding: int = 0,
    queries: int = 1,
    context_bytes: int = 128 << 10,
    cache_dtype: torch.dtype | None = None,
    scales: str = "",
    repeat: int = 1,
) -> None:
    """`queries`: of each row of a decode step, as rows that verify drafts have. `context_bytes`: room for expanded keys
    of cached context. `scales`: of the cache, by "token" or "layer". `repeat`: rows, so many times."""
    torch.manual_seed(0)
    rows = [(cached + prefix, new) for cached, new in MIXES[mix]] * repeat
    if queries > 1:
        rows = [(cached, queries) for cached, _ in rows]
    heads, rank, rope, nope, _ = shape
    lens = [cached + new for cached, new in rows]
    shared = prefix // page_tokens
    per_row = [-(-n // page_tokens) for n in lens]
    own = (torch.randperm(sum(per_row)) + 1 + shared).split(per_row)
    weights, features = make_layer(shape, dtype, device)
    # Stale but finite data everywhere, and entries past a row's end that must never be read.
    latents = torch.randn(sum(per_row) + shared + 1, page_tokens, rank + rope, device=device)
    cache, kv_scales = filled_pages(latents, cache_dtype or dtype, scales)
    features = replace(features, kv_scales=kv_scales)
    table = torch.full((len(rows) + 3, max(per_row) + 1), -1, dtype=torch.int32)
    places = torch.randperm(len(rows) + 3)[: len(rows)]
    for place, blocks in zip(places.tolist(), own, strict=True):
        table[place, : len(blocks)] = blocks
        table[place, :shared] = torch.arange(1, shared + 1)
    decode_only = queries > 1 or all(new == 1 for _, new in rows)
    counts = np.array([new for _, new in rows] + [queries if decode_only else 0] * padding, np.int32)
    starts = torch.tensor([0, *counts.tolist()]).cumsum(0).int()
    num_tokens = int(starts[-1]) + (0 if decode_only else padding)
    q = torch.randn(num_tokens, heads, nope + rope, device=device).to(dtype)
    in_step = torch.cat([places, torch.full((padding,), -1)]).int()
    seq_lens = torch.tensor(lens + [0] * padding).int()
    if queries > 1:  # each token is a row of the attention's
        ahead = torch.arange(queries, 0, -1) - 1
        seq_lens = torch.where(in_step[:, None] < 0, 0, seq_lens[:, None] - ahead).flatten().int()
        in_step = in_step.repeat_interleave(queries)
    backend = TritonLatentBackend(len(counts), dtype, context_bytes)
    blocks = torch.from_numpy(backend.plan_queries(counts)).to(device)
    length = torch.tensor([prefix], dtype=torch.int32, device=device) if prefix else None
    step = StepInputs(
        in_step.to(device), num_tokens, starts.to(device), seq_lens.to(device), decode_only, blocks, length,
        has_decode_rows=bool((counts == 1).any()),
    )  # fmt: skip
    for _ in range(2):  # nothing may be left behind by the first
        metadata = backend.build(step, table.to(device), page_tokens)
        ours = backend.attend(q, weights, cache, metadata, features)
        assert ours.isfinite().all() and ours.shape == (num_tokens, heads, shape[-1])
        for i, place in enumerate(places.tolist()):
            pages = table[place, : per_row[i]].long().to(device)
            read = read_latents(cache, pages, kv_scales, torch.float32)[: lens[i]]
            part = slice(int(starts[i]), int(starts[i + 1]))
            check_close(ours[part], dense(q[part], read, weights, features), dtype)


def check_latent_write(
    device: str, dtype: torch.dtype, shape: Shape, interleaved: bool, cache_dtype: torch.dtype, scales: str = ""
) -> None:
    """Queries are rotated, and pages filled, as by the backend in torch; what is stored may differ by its rounding."""
    heads, rank, rope, nope, v = shape
    tokens, size, pages = 37, 16, 5
    torch.manual_seed(0)
    features = LatentFeatures(1.0, rank, nope, rope, v, interleaved)
    wide = torch.randn(tokens, 3 + rank + rope, device=device).to(dtype)
    q = torch.randn(tokens, heads, nope + rope, device=device).to(dtype)
    turns = torch.rand(64, rope // 2) * 6
    table = torch.cat((turns.cos(), turns.sin()), 1).to(device)
    positions = torch.randint(0, 64, (tokens,), dtype=torch.int32).to(device)
    slots = torch.randperm(pages * size)[:tokens].to(device)
    norm = (torch.randn(rank, device=device), 1e-6)
    found = []
    for backend in (TorchLatentBackend(), TritonLatentBackend(tokens, dtype)):
        cache, kv_scales = filled_pages(torch.zeros(pages, size, rank + rope, device=device), cache_dtype, scales)
        mine, kv = q.clone(), wide.clone()[:, 3:]
        backend.write(
            mine, kv, norm, Angles(table, positions), cache, slots, None, replace(features, kv_scales=kv_scales)
        )
        assert torch.equal(mine[..., :nope], q[..., :nope])
        found.append((mine, read_latents(cache, torch.arange(pages, device=device), kv_scales, torch.float32)))
    (theirs, wanted), (ours, latents) = found
    check_close(ours, theirs, dtype)
    step = {torch.float8_e4m3fn: 1 / 8, torch.int8: 1 / 64}.get(cache_dtype, 0.0)
    most = wanted.abs().amax(-1, keepdim=True) if cache_dtype is torch.int8 else wanted.abs()
    off = (latents - wanted).abs()
    assert bool((off <= step * most + (2e-2 if dtype is torch.bfloat16 else 2e-5) * (1 + wanted.abs())).all())
    assert bool(wanted.abs().sum() > 1)
