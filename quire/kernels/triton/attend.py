"""The loop that all attention kernels share: online softmax over tiles of keys."""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.paged_attention import AttentionFeatures

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [M, DP], in the compute dtype
    acc,  # [M, DP] float32
    max_score,  # [M] float32: running maximum, as a power of two
    total,  # [M] float32: running sum of weights
    kv_cache,  # [blocks, 2, KV, BLOCK_SIZE, D]
    pages,  # the row's block table
    kv_head,
    begin,  # first key
    end,  # one past the last key
    q_pos,  # [M]: keys after it are masked
    slope,  # [M]: ALiBi's, or unused
    scale,
    softcap,
    token_scales,  # [blocks, 2, KV, BLOCK_SIZE] float32; unused without SCALE_PAGE
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every key from begin to end is seen by every query, and fills whole tiles
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PAGE: tl.constexpr,  # elements from a block of the cache to the next; used with SCALE_PAGE
    SCALE_PAGE: tl.constexpr,  # scales from a block to the next; 0: there are none of tokens
    ORDERED: tl.constexpr = False,  # weights are added in an order that does not depend on M and the number of warps
):
    # Without soft-cap and ALiBi, scores are scaled in the multiply-add that the exponential needs anyway; scale > 0.
    # Otherwise the scale is applied with those.
    LATE_SCALE: tl.constexpr = not (SOFTCAP or ALIBI)
    factor = scale * LOG2E if LATE_SCALE else 1.0
    if SOFTCAP:
        twice, cap = 2.0 * LOG2E * scale / softcap, softcap * LOG2E
    columns = tl.arange(0, DP)
    in_head = columns < D
    for tile in range(begin, end, TILE):
        keys = tile + tl.arange(0, TILE)
        inside = keys < end
        block = tl.load(pages + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        if SCALE_PAGE > 0:
            place = kv_head * BLOCK_SIZE + keys % BLOCK_SIZE
            first = block * PAGE + place * D
            k_at = kv_cache + first[None, :] + columns[:, None]
            v_at = kv_cache + (first + KV * BLOCK_SIZE * D)[:, None] + columns[None, :]
            scales_at = token_scales + block * SCALE_PAGE + place
            k_scale = tl.load(scales_at, mask=inside, other=0.0)
            v_scale = tl.load(scales_at + KV * BLOCK_SIZE, mask=inside, other=0.0)
        else:
            place = (block * 2 * KV + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
            k_at = kv_cache + place[None, :] * D + columns[:, None]
            v_at = kv_cache + (place + KV * BLOCK_SIZE)[:, None] * D + columns[None, :]
        if MASKED or D != DP:
            k = tl.load(k_at, mask=inside[None, :] & in_head[:, None], other=0.0).to(q.dtype)
        else:
            k = tl.load(k_at).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if SCALE_PAGE > 0:
            scores *= k_scale[None, :]
        if SOFTCAP:
            scores = cap - 2.0 * cap / (tl.math.exp2(scores * twice) + 1.0)
        elif ALIBI:
            scores *= scale * LOG2E
        if ALIBI:
            scores += (slope * LOG2E)[:, None] * (keys[None, :] - q_pos[:, None]).to(tl.float32)
        if MASKED:
            seen = inside[None, :] & (keys[None, :] <= q_pos[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > q_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1) * factor)
        # A row without a visible key so far has -inf, and -inf - -inf is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.math.exp2(scores * factor - base[:, None])
        shrink = tl.math.exp2(max_score - base)
        if ORDERED:
            # By the matrix instructions, in the order of the keys; the columns are equal.
            ones = tl.full([TILE, 16], 1.0, q.dtype)
            added = tl.max(tl.dot(weights.to(q.dtype), ones, input_precision="ieee"), 1)
        else:
            added = tl.sum(weights, 1)
        total = total * shrink + added
        if SCALE_PAGE > 0:
            weights *= v_scale[None, :]
        if MASKED or D != DP:
            v = tl.load(v_at, mask=inside[:, None] & in_head[None, :], other=0.0).to(q.dtype)
        else:
            v = tl.load(v_at).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        max_score = new_max
    return acc, max_score, total


@triton.jit
def start(sinks, head, real, M: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr):
    """The initial state of `attend`: empty, or with a sink, which acts as one key whose value is zero."""
    acc = tl.zeros([M, DP], tl.float32)
    max_score = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        max_score = tl.load(sinks + head, mask=real, other=float("-inf")) * LOG2E
        total = tl.where(real, 1.0, 0.0)
    return acc, max_score, total


def feature_flags(features: AttentionFeatures) -> dict[str, bool]:
    """Compile-time flags: kernels are compiled without the features a layer lacks."""
    return {
        "SOFTCAP": features.softcap is not None,
        "ALIBI": features.slopes is not None,
        "SINKS": features.sinks is not None,
    }


def scale_arguments(features: AttentionFeatures, kv_cache: torch.Tensor) -> dict[str, Any]:
    """Of a cache with scales: those of tokens, or what a layer's are folded into, the output's factor."""
    scales = features.kv_scales
    by_token = scales.by_token if scales is not None else None
    return {
        "token_scales": by_token if by_token is not None else kv_cache,
        "v_scale": scales.v if scales is not None else 1.0,
        "PAGE": kv_cache.stride(0) if by_token is not None else 0,
        "SCALE_PAGE": by_token.stride(0) if by_token is not None else 0,
        "V_SCALED": scales is not None and scales.v != 1.0,
    }


def score_scale(features: AttentionFeatures) -> float:
    """By which the product of a query and a key as stored is a score."""
    return features.scale * features.kv_scales.k if features.kv_scales is not None else features.scale
