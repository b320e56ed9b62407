"""Batches of rows over pages, for tests of attention kernels."""

import torch

from quire.kernels.kv_scales import KVScales, quantize_vectors
from quire.kernels.paged_attention import AttentionFeatures
from quire.messages.kv_cache import FullAttentionSpec
from quire.worker.cache_pages import page_views

MIXES = {
    "decode": [(0, 1), (5, 1), (40, 1), (16, 1), (15, 1), (130, 1)],
    "prompts": [(0, 20), (0, 2), (33, 7), (16, 16)],
    "mixed": [(31, 1), (0, 9), (64, 1), (10, 3), (3, 1), (7, 25)],
    "long": [(0, 300), (140, 150), (700, 1)],
}


def paged_batch(rows, block_size, heads, kv_heads, head_size, dtype, window=None):
    """rows: (cached, new) -> q, cache, rows, query_start, seq_lens, table, as attention kernels accept them."""
    torch.manual_seed(0)
    lens = [cached + new for cached, new in rows]
    per_row = [-(-n // block_size) for n in lens]
    ids = (torch.randperm(sum(per_row)) + 1).split(per_row)
    cache = torch.randn(sum(per_row) + 1, 2, kv_heads, block_size, head_size).to(dtype)
    table = torch.full((len(rows) + 2, max(per_row) + 1), -(10**6), dtype=torch.int32)  # entries never to be read
    places = torch.randperm(len(rows) + 2)[: len(rows)]
    for place, blocks, (cached, _) in zip(places.tolist(), ids, rows, strict=True):
        table[place, : len(blocks)] = blocks
        if window:  # blocks wholly outside the window have been freed
            table[place, : max(0, cached - window + 1) // block_size] = 0
    starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, head_size).to(dtype)
    return q, cache, places, starts, torch.tensor(lens).int(), table


FEATURES = {
    "soft-cap": ("softcap",),
    "alibi": ("slopes",),
    "sinks": ("sinks",),
    "all": ("softcap", "slopes", "sinks"),
}


def make_features(features, heads, scale, window=None, device="cpu"):
    """features: a name of FEATURES, or "". Sinks from negligible to larger than all keys; ALiBi slopes; a soft-cap that
    changes scores."""
    made = {
        "softcap": 1.5,
        "slopes": 2.0 ** -torch.linspace(0.5, 8, heads, device=device),
        "sinks": torch.linspace(-9, 6, heads, device=device),
    }
    return AttentionFeatures(scale, window, **{name: made[name] for name in FEATURES.get(features, ())})


def scaled_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, KVScales]:
    """An empty cache with a scale for each token and head, in pages as the engine lays them out."""
    blocks, _, kv_heads, block_size, head_size = shape
    name = str(dtype).removeprefix("torch.")
    spec = FullAttentionSpec(block_size, kv_heads, head_size, name, scale_dtype="float32")
    cache, by_token = page_views(torch.zeros(blocks, spec.page_bytes, dtype=torch.uint8, device=device), spec)
    return cache, KVScales(by_token=by_token)


def filled_cache(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, KVScales]:
    """Of vectors [blocks, 2, KV, block_size, D]."""
    cache, scales = scaled_cache(tuple(vectors.shape), dtype, vectors.device)
    numbers, by_token = quantize_vectors(vectors, dtype)
    cache.copy_(numbers)
    scales.by_token.copy_(by_token)
    return cache, scales
