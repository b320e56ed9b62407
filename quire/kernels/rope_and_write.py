"""Between QKV projection and attention: norm and rotary embedding of queries and keys, and the KV-cache write."""

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.kv_scales import KVScales
from quire.kernels.kv_write import cache_rows, kv_write, kv_write_scaled
from quire.kernels.rms_norm import rms_norm_torch
from quire.kernels.rope import apply_rope, gather_cos_sin

QKNormParams = tuple[torch.Tensor, torch.Tensor, float]  # weights of queries and of keys [D], epsilon


def norm_and_rope(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    qk_norm: QKNormParams | None,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [N, (H + 2 KV) * D] -> q [N, H, D], k and v [N, KV, D]. cos_sin None: nothing is rotated."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q_and_k, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = q_and_k.split((num_heads, num_kv_heads), dim=1)
        q_and_k = torch.cat((rms_norm_torch(q, q_weight, eps), rms_norm_torch(k, k_weight, eps)), dim=1)
    if cos_sin is not None:
        # Queries and keys are adjacent and have the same angles: one call instead of two.
        q_and_k = apply_rope(q_and_k, *cos_sin)
    q, k = q_and_k.split((num_heads, num_kv_heads), dim=1)
    return q, k, v


def rope_and_write_torch(
    qkv: torch.Tensor,  # [N, (H + 2 KV) * D]
    num_heads: int,
    qk_norm: QKNormParams | None,
    table: torch.Tensor | None,  # [positions, R]: cosines of R / 2 angles, then sines; None: nothing is rotated
    positions: torch.Tensor | None,  # [N]
    kv_cache: torch.Tensor,  # [blocks, 2, KV, block_size, D]
    slots: torch.Tensor,  # [N]
    scales: KVScales | None = None,
) -> torch.Tensor:  # q [N, H, D]
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    cos_sin = gather_cos_sin(table, positions) if table is not None and positions is not None else None
    q, k, v = norm_and_rope(qkv, num_heads, num_kv_heads, qk_norm, cos_sin)
    if scales is not None:
        kv_write_scaled(k, v, kv_cache, slots.long(), scales)
        return q
    kv_write(k.to(kv_cache.dtype), v.to(kv_cache.dtype), kv_cache, cache_rows(slots.long(), num_kv_heads, block_size))
    return q


def rope_and_write(
    qkv: torch.Tensor,
    num_heads: int,
    qk_norm: QKNormParams | None,
    table: torch.Tensor | None,
    positions: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    if use_triton(qkv):
        from quire.kernels.triton import rope_and_write as kernel

        return kernel.rope_and_write(qkv, num_heads, qk_norm, table, positions, kv_cache, slots, scales)
    return rope_and_write_torch(qkv, num_heads, qk_norm, table, positions, kv_cache, slots, scales)
