"""Scales of keys and values that the cache holds in fp8 or int8: a vector is what is stored times its scale."""

from dataclasses import dataclass

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # of the numbers that are stored
SMALLEST_MAX = 1e-20  # of a vector: one of zeros alone has a scale too


@dataclass(frozen=True, eq=False)
class KVScales:
    """Of a layer: one for all its keys and one for all its values, or one for each token and head."""

    k: float = 1.0
    v: float = 1.0
    by_token: torch.Tensor | None = None  # [blocks, 2, KV, block_size] float32, which writing fills; k and v are 1 then


def quantize_vectors(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> numbers of `dtype` of the same shape, and their scales [...] float32."""
    x, largest = x.float(), LARGEST[dtype]
    most = x.abs().amax(-1).clamp(min=SMALLEST_MAX)
    return stored(x * (largest / most)[..., None], dtype), most * (1.0 / largest)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in units of its scale -> the nearest numbers of `dtype`."""
    x = x if dtype.is_floating_point else torch.floor(x + 0.5)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def dequantized(
    kv_cache: torch.Tensor, blocks: torch.Tensor, scales: KVScales | None, dtype: torch.dtype
) -> torch.Tensor:
    """Blocks of a cache [blocks, 2, KV, block_size, D], times their scales."""
    if scales is None:
        return kv_cache[blocks].to(dtype)
    if scales.by_token is None:
        by_kind = torch.tensor([scales.k, scales.v], device=kv_cache.device).view(2, 1, 1, 1)
    else:
        by_kind = scales.by_token[blocks][..., None]
    return (kv_cache[blocks].float() * by_kind).to(dtype)
