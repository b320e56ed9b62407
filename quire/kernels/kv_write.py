"""Writing keys and values into pages.

A cache is [blocks, 2, KV, block_size, D]: keys then values, one head's tokens side by side, so that a page of one head
is contiguous, to gather and to multiply by.
"""

import torch

from quire.kernels.kv_scales import KVScales, quantize_vectors, stored


def cache_rows(slots: torch.Tensor, num_kv_heads: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slots [N] (block * block_size + offset) -> rows of keys and of values, each [N * KV], of the cache as [-1, D].

    The same for every layer of a group: compute it once a step.
    """
    block, offset = slots // block_size, slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device)
    keys = (block[:, None] * 2 * num_kv_heads + heads) * block_size + offset[:, None]
    return keys.view(-1), (keys + num_kv_heads * block_size).view(-1)


def kv_write_padded(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v [N, KV, ...] -> slots [N] of a cache [blocks, 2, KV, block_size, ...] with gaps between its pages."""
    block_size = kv_cache.shape[3]
    at = (slots // block_size, slots % block_size)
    for part, vectors in enumerate((k, v)):
        kv_cache[:, part].transpose(1, 2)[at] = vectors


def kv_write_scaled(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, scales: KVScales
) -> None:
    """k, v [N, KV, D] -> slots [N], divided by their scales; those of each token and head are computed and written."""
    if scales.by_token is None:
        pair = (stored(k.float() / scales.k, kv_cache.dtype), stored(v.float() / scales.v, kv_cache.dtype))
        kv_write_padded(*pair, kv_cache, slots)
        return
    (k, k_scale), (v, v_scale) = quantize_vectors(k, kv_cache.dtype), quantize_vectors(v, kv_cache.dtype)
    kv_write_padded(k, v, kv_cache, slots)
    kv_write_padded(k_scale, v_scale, scales.by_token, slots)


def kv_write(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    """k, v [N, KV, D] -> the rows of kv_cache that cache_rows returned."""
    head_size = k.shape[-1]
    flat = kv_cache.view(-1, head_size)
    flat.index_copy_(0, rows[0], k.reshape(-1, head_size))
    flat.index_copy_(0, rows[1], v.reshape(-1, head_size))
