"""Norms of queries and keys, rotary embedding, and the write of keys and values into the cache."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.kv_scales import LARGEST, SMALLEST_MAX, KVScales
from quire.kernels.rope_and_write import QKNormParams

HEADS_PER_PROGRAM = 8
_SMALLEST_MAX = tl.constexpr(SMALLEST_MAX)


@triton.jit
def _rope_and_write_kernel(
    qkv,  # [N, (H + 2 * KV) * D]
    q_out,  # [N, H, D]
    kv_cache,  # [blocks, 2, KV, block_size, D]
    q_weight,
    k_weight,
    eps,
    table,  # [positions, R]: cosines of R / 2 angles, then sines; unused if R is 0
    positions,
    slots,
    token_scales,  # [blocks, 2, KV, BLOCK_SIZE] float32, to be written; unused without SCALE_PAGE
    k_inverse,  # of a scale of all keys; unused unless LAYER_SCALES
    v_inverse,
    stride_token,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,  # elements from a block of the cache to the next
    SCALE_PAGE: tl.constexpr,  # scales from a block to the next; 0: there are none of tokens
    LAYER_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,  # number that the cache can hold, if there are scales
    HAS_QK_NORM: tl.constexpr,
    HB: tl.constexpr,
    HALF: tl.constexpr,  # R / 2, rounded up to a power of two
    REST: tl.constexpr,  # D - R, likewise; 0 if there is nothing beyond
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    is_q = head < H
    is_k = (head >= H) & (head < H + KV)
    is_v = (head >= H + KV) & (head < H + 2 * KV)
    exists = head < H + 2 * KV
    source = qkv + token * stride_token + head[:, None] * D

    pair = tl.arange(0, HALF)
    in_half = (pair < R // 2)[None, :]
    here = exists[:, None] & in_half
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if R > 0:
        left = tl.load(source + pair[None, :], mask=here, other=0.0).to(tl.float32)
        right = tl.load(source + R // 2 + pair[None, :], mask=here, other=0.0).to(tl.float32)
    beyond = tl.arange(0, REST if REST > 0 else 1)
    rest_here = exists[:, None] & (beyond < D - R)[None, :]
    if REST > 0:
        rest = tl.load(source + R + beyond[None, :], mask=rest_here, other=0.0).to(tl.float32)

    if HAS_QK_NORM:
        square = tl.zeros([HB], tl.float32)
        if R > 0:
            square += tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
        scale = tl.where(is_v, 1.0, tl.rsqrt(square / D + eps))[:, None]
        if R > 0:
            left *= scale * _weight(q_weight, k_weight, pair, pair < R // 2, is_q, is_k)
            right *= scale * _weight(q_weight + R // 2, k_weight + R // 2, pair, pair < R // 2, is_q, is_k)
        if REST > 0:
            rest *= scale * _weight(q_weight + R, k_weight + R, beyond, beyond < D - R, is_q, is_k)

    slot = tl.load(slots + token).to(tl.int64)
    kind = tl.where(is_v, 1, 0)  # keys before values
    kv_head = tl.where(is_v, head - H - KV, head - H)
    if SCALE_PAGE > 0:
        place = (kind * KV + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        to_cache = kv_cache + (slot // BLOCK_SIZE * PAGE + place * D)[:, None]
    else:
        page = ((slot // BLOCK_SIZE) * 2 + kind) * KV + kv_head
        to_cache = kv_cache + ((page * BLOCK_SIZE + slot % BLOCK_SIZE) * D)[:, None]
    to_q = q_out + (token * H + head)[:, None] * D
    if R > 0:
        angles = table + tl.load(positions + token).to(tl.int64) * R
        cos = tl.load(angles + pair, mask=pair < R // 2, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(angles + R // 2 + pair, mask=pair < R // 2, other=0.0).to(tl.float32)[None, :]
        turns = (is_q | is_k)[:, None]
        new_left = tl.where(turns, left * cos - right * sin, left)
        new_right = tl.where(turns, right * cos + left * sin, right)
        q_here, kv_here = is_q[:, None] & in_half, (is_k | is_v)[:, None] & in_half
        tl.store(to_q + pair[None, :], new_left.to(q_out.dtype.element_ty), mask=q_here)
        tl.store(to_q + R // 2 + pair[None, :], new_right.to(q_out.dtype.element_ty), mask=q_here)
    if REST > 0:
        tl.store(to_q + R + beyond[None, :], rest.to(q_out.dtype.element_ty), mask=rest_here & is_q[:, None])
    factor = tl.zeros([HB], tl.float32)
    if SCALE_PAGE > 0:
        most = tl.full([HB], _SMALLEST_MAX, tl.float32)
        if R > 0:
            most = tl.maximum(most, tl.maximum(tl.max(tl.abs(new_left), 1), tl.max(tl.abs(new_right), 1)))
        if REST > 0:
            most = tl.maximum(most, tl.max(tl.abs(rest), 1))
        factor = LARGEST / most
        to_scale = token_scales + slot // BLOCK_SIZE * SCALE_PAGE + place
        tl.store(to_scale, most * (1.0 / LARGEST), mask=is_k | is_v)
    elif LAYER_SCALES:
        factor = tl.where(is_v, v_inverse, k_inverse)
    SCALED: tl.constexpr = LAYER_SCALES or SCALE_PAGE > 0
    if R > 0:
        _store(to_cache + pair[None, :], new_left, factor, kv_here, SCALED, LARGEST)
        _store(to_cache + R // 2 + pair[None, :], new_right, factor, kv_here, SCALED, LARGEST)
    if REST > 0:
        kv_rest = rest_here & (is_k | is_v)[:, None]
        _store(to_cache + R + beyond[None, :], rest, factor, kv_rest, SCALED, LARGEST)


@triton.jit
def _store(at, x, factor, here, SCALED: tl.constexpr, LARGEST: tl.constexpr):
    """x [HB, columns], times factor [HB] if SCALED, in the cache's own type."""
    kind: tl.constexpr = at.dtype.element_ty
    if SCALED:
        x = x * factor[:, None]
        if kind == tl.int8:
            x = tl.floor(x + 0.5)
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    tl.store(at, x.to(kind), mask=here)


@triton.jit
def _weight(q_weight, k_weight, columns, inside, is_q, is_k):
    """[HB, columns]: each head's own norm weight; values have none."""
    q = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    k = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], q, tl.where(is_k[:, None], k, 1.0))


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
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    tokens, rotary = qkv.shape[0], table.shape[1] if table is not None else 0
    q_out = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (qkv, qkv, 0.0)
    rest = head_dim - rotary
    by_token = scales.by_token if scales is not None else None
    grid = (tokens, triton.cdiv(num_heads + 2 * kv_heads, HEADS_PER_PROGRAM))
    _rope_and_write_kernel[grid](
        qkv,
        q_out,
        kv_cache,
        q_weight,
        k_weight,
        eps,
        table if table is not None else qkv,
        positions if positions is not None else slots,
        slots,
        by_token if by_token is not None else slots,
        1.0 / scales.k if scales is not None else 1.0,
        1.0 / scales.v if scales is not None else 1.0,
        qkv.stride(0),
        H=num_heads,
        KV=kv_heads,
        D=head_dim,
        R=rotary,
        BLOCK_SIZE=block_size,
        PAGE=kv_cache.stride(0) if by_token is not None else 0,
        SCALE_PAGE=by_token.stride(0) if by_token is not None else 0,
        LAYER_SCALES=scales is not None and by_token is None,
        LARGEST=LARGEST.get(kv_cache.dtype, 0.0),
        HAS_QK_NORM=qk_norm is not None,
        HB=HEADS_PER_PROGRAM,
        HALF=triton.next_power_of_2(max(1, rotary // 2)),
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
        **early_launch(qkv),
    )
    return q_out
