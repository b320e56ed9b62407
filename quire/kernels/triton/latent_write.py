"""Between projections and latent attention: norm of the compressed part, rotation, and the write into the cache."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.kv_scales import LARGEST, SMALLEST_MAX, KVScales
from quire.kernels.rms_norm import RMSNormParams

HEADS_PER_PROGRAM = 16
_SMALLEST_MAX = tl.constexpr(SMALLEST_MAX)


@triton.jit
def _latent_write_kernel(
    q_rope,  # [N, H, ROPE], with strides of its own: rotated in place
    kv,  # [N, RANK + ROPE]
    norm_weight,  # [RANK]
    eps,
    table,  # [positions, ROPE]: cosines of ROPE / 2 angles, then sines
    positions,
    kv_cache,  # [pages, BLOCK_SIZE, RANK + ROPE]
    slots,
    token_scales,  # [pages, BLOCK_SIZE] float32, to be written; unused without SCALE_PAGE
    inverse,  # of a scale of all vectors; unused unless LAYER_SCALE
    q_token,
    q_head,
    kv_token,
    H: tl.constexpr,
    HB: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RP: tl.constexpr,
    HALF: tl.constexpr,  # ROPE / 2, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,  # elements from a page to the next
    SCALE_PAGE: tl.constexpr,  # scales from a page to the next; 0: there are none of tokens
    LAYER_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,  # number that the cache can hold, if there are scales
    INTERLEAVED: tl.constexpr,  # pairs are neighbours, not halves
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    in_half = pair < ROPE // 2
    left_at = pair * 2 if INTERLEAVED else pair
    right_at = left_at + (1 if INTERLEAVED else ROPE // 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    angles = table + tl.load(positions + token).to(tl.int64) * ROPE
    cos = tl.load(angles + pair, mask=in_half, other=1.0).to(tl.float32)
    sin = tl.load(angles + ROPE // 2 + pair, mask=in_half, other=0.0).to(tl.float32)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HB + tl.arange(0, HB)
        here = (head < H)[:, None] & in_half[None, :]
        vectors = q_rope + token * q_token + head[:, None] * q_head
        left = tl.load(vectors + left_at[None, :], mask=here, other=0.0).to(tl.float32)
        right = tl.load(vectors + right_at[None, :], mask=here, other=0.0).to(tl.float32)
        turned = left * cos[None, :] - right * sin[None, :]
        tl.store(vectors + left_at[None, :], turned.to(q_rope.dtype.element_ty), mask=here)
        turned = right * cos[None, :] + left * sin[None, :]
        tl.store(vectors + right_at[None, :], turned.to(q_rope.dtype.element_ty), mask=here)
        return
    column = tl.arange(0, RP)
    inside = column < RANK
    source = kv + token * kv_token
    latent = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(source + RANK + left_at, mask=in_half, other=0.0).to(tl.float32)
    right = tl.load(source + RANK + right_at, mask=in_half, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps) * weight
    new_left, new_right = left * cos - right * sin, right * cos + left * sin
    slot = tl.load(slots + token).to(tl.int64)
    page, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = kv_cache + page * PAGE + place * (RANK + ROPE)
    if SCALE_PAGE > 0:
        most = tl.maximum(tl.max(tl.abs(new_left), 0), tl.max(tl.abs(new_right), 0))
        most = tl.maximum(tl.maximum(tl.max(tl.abs(latent), 0), most), _SMALLEST_MAX)
        tl.store(token_scales + page * SCALE_PAGE + place, most * (1.0 / LARGEST))
        inverse = LARGEST / most
    SCALED: tl.constexpr = LAYER_SCALE or SCALE_PAGE > 0
    _store(target + column, latent, inverse, inside, SCALED, LARGEST)
    _store(target + RANK + left_at, new_left, inverse, in_half, SCALED, LARGEST)
    _store(target + RANK + right_at, new_right, inverse, in_half, SCALED, LARGEST)


@triton.jit
def _store(at, x, inverse, here, SCALED: tl.constexpr, LARGEST: tl.constexpr):
    """In the cache's own type, in units of the scale if there is one."""
    kind: tl.constexpr = at.dtype.element_ty
    if SCALED:
        x = x * inverse
        if kind == tl.int8:
            x = tl.floor(x + 0.5)
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    tl.store(at, x.to(kind), mask=here)


def latent_write(
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    norm: RMSNormParams,
    table: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
    scales: KVScales | None = None,
) -> None:
    tokens, heads, rope = q_rope.shape
    rank = kv.shape[1] - rope
    by_token = scales.by_token if scales is not None else None
    _latent_write_kernel[(tokens, 1 + triton.cdiv(heads, HEADS_PER_PROGRAM))](
        q_rope, kv, *norm, table, positions, kv_cache, slots,
        by_token if by_token is not None else slots, 1.0 / scales.k if scales is not None else 1.0,
        q_rope.stride(0), q_rope.stride(1), kv.stride(0),
        H=heads, HB=HEADS_PER_PROGRAM, RANK=rank, ROPE=rope, RP=triton.next_power_of_2(rank),
        HALF=triton.next_power_of_2(rope // 2), BLOCK_SIZE=kv_cache.shape[1], PAGE=kv_cache.stride(0),
        SCALE_PAGE=by_token.stride(0) if by_token is not None else 0,
        LAYER_SCALE=scales is not None and by_token is None, LARGEST=LARGEST.get(kv_cache.dtype, 0.0),
        INTERLEAVED=interleaved, num_warps=4, **early_launch(kv),
    )  # fmt: skip
