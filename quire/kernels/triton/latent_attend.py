"""The loop that kernels over latent pages share: a tile of keys is loaded once, and is also that of values.

Everything is transposed, with keys or latent columns as rows and queries as columns: the left operand of a Hopper
matrix instruction has 64 rows and is read from shared memory, the right one has as few columns as there are heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.kv_scales import KVScales

LOG2E = 1.4426950408889634


@triton.jit
def latent_attend(
    q,  # [RP, M]: queries in the latent space; unused if RP > CHUNK
    q_rope,  # [PP, M]
    q_at,  # [M] pointers to the queries, for loading them in chunks
    acc,  # [RP, M] float32
    max_score,  # [M] float32: running maximum, as a power of two
    total,  # [TILE, M] float32: running sums of weights, to be added up at the end
    kv_cache,  # [pages, BLOCK_SIZE, RANK + ROPE]
    pages,  # the row's block table
    begin,  # first key
    end,  # one past the last key
    lengths,  # [M]: keys from it on are masked
    factor,  # from scores to powers of two; > 0
    token_scales,  # [pages, BLOCK_SIZE] float32; unused without SCALE_PAGE
    cache_scale,  # of all vectors; unused unless QUANTIZED
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RP: tl.constexpr,
    PP: tl.constexpr,
    CHUNK: tl.constexpr,  # columns multiplied at once: RP, or fewer where registers would not hold more
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,  # elements from a page to the next
    SCALE_PAGE: tl.constexpr,  # scales from a page to the next; 0: there are none of tokens
    QUANTIZED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every key from begin to end is seen by every query, and fills whole tiles
):
    columns, rope_columns = tl.arange(0, RP), tl.arange(0, PP)
    kind: tl.constexpr = q_rope.dtype
    masked: tl.constexpr = MASKED or RANK != RP or ROPE != PP
    # Ahead: loads whose addresses are loaded in the same step are not started early by the compiler.
    keys = begin + tl.arange(0, TILE)
    next_block = tl.load(pages + keys // BLOCK_SIZE, mask=keys < end, other=0)
    for tile in range(begin, end, TILE):
        keys = tile + tl.arange(0, TILE)
        inside = keys < end
        block = next_block.to(tl.int64)
        place = kv_cache + block * PAGE + (keys % BLOCK_SIZE) * (RANK + ROPE)
        at = place[:, None]
        latent = _load(at + columns[None, :], inside[:, None] & (columns < RANK)[None, :], masked).to(kind)
        later = keys + TILE
        next_block = tl.load(pages + later // BLOCK_SIZE, mask=later < end, other=0)
        rope_here = inside[:, None] & (rope_columns < ROPE)[None, :]
        rope = _load(at + RANK + rope_columns[None, :], rope_here, masked).to(kind)
        if CHUNK == RP:
            scores = tl.dot(latent, q, input_precision="ieee")
        else:
            scores = tl.zeros([TILE, acc.shape[1]], tl.float32)
            for first in range(0, RP, CHUNK):
                part = first + tl.arange(0, CHUNK)
                left = _load(at + part[None, :], inside[:, None] & (part < RANK)[None, :], True).to(kind)
                right = tl.load(q_at[None, :] + part[:, None], mask=(part < RANK)[:, None], other=0.0)
                scores = tl.dot(left, right, scores, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee")
        by_key = tl.zeros([TILE], tl.float32) + cache_scale
        if SCALE_PAGE > 0:
            by_key = tl.load(token_scales + block * SCALE_PAGE + keys % BLOCK_SIZE, mask=inside, other=0.0)
        if QUANTIZED:
            scores *= by_key[:, None]
        if MASKED:
            scores = tl.where(inside[:, None] & (keys[:, None] < lengths[None, :]), scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 0) * factor)
        # A query without a visible key so far has -inf, and -inf - -inf is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.math.exp2(scores * factor - base[None, :])
        shrink = tl.math.exp2(max_score - base)
        total = total * shrink[None, :] + weights
        if QUANTIZED:
            # Loaded again, from the L2: a tile that is converted would be copied through registers to be transposed.
            here = inside[None, :] & (columns < RANK)[:, None]
            values = _load(place[None, :] + columns[:, None], here, masked).to(kind)
            weights *= by_key[:, None]
        else:
            values = tl.trans(latent)
        acc = tl.dot(values, weights.to(q_rope.dtype), acc * shrink[None, :], input_precision="ieee")
        max_score = new_max
    return acc, max_score, total


@triton.jit
def _load(at, here, MASKED: tl.constexpr):
    return tl.load(at, mask=here, other=0.0) if MASKED else tl.load(at)


@triton.jit
def load_queries(
    q,  # [units, H, RANK]
    unit,  # [M]
    q_rope,  # [N, H, ROPE], with strides of its own
    token,  # [M]
    rope_token,
    rope_head,
    head,  # [M]
    real,  # [M]
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RP: tl.constexpr,
    PP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[RP, M], [PP, M], and pointers [M] to the first; the first is meaningless if it is to be loaded in chunks."""
    columns, rope_columns = tl.arange(0, RP), tl.arange(0, PP)
    at = q + (tl.where(real, unit, 0).to(tl.int64) * H + tl.where(real, head, 0)) * RANK
    rope_at = q_rope + token.to(tl.int64) * rope_token + head * rope_head
    turned = tl.load(
        rope_at[None, :] + rope_columns[:, None], mask=real[None, :] & (rope_columns < ROPE)[:, None], other=0.0
    )
    vectors = turned
    if CHUNK == RP:
        vectors = tl.load(at[None, :] + columns[:, None], mask=real[None, :] & (columns < RANK)[:, None], other=0.0)
    return vectors, turned, at


def padded(rank: int, rope: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of vectors, to the power of two. In float32, products are computed by threads from their own registers."""
    size = max(16, triton.next_power_of_2(rank))
    chunk = min(size, 32) if dtype is torch.float32 else size
    return {"RANK": rank, "ROPE": rope, "RP": size, "PP": max(16, triton.next_power_of_2(rope)), "CHUNK": chunk}


def page_arguments(kv_cache: torch.Tensor, scales: KVScales | None) -> dict[str, Any]:
    by_token = scales.by_token if scales is not None else None
    return {
        "BLOCK_SIZE": kv_cache.shape[1],
        "PAGE": kv_cache.stride(0),
        "token_scales": by_token if by_token is not None else kv_cache,
        "SCALE_PAGE": by_token.stride(0) if by_token is not None else 0,
        "cache_scale": scales.k if scales is not None else 1.0,
        "QUANTIZED": scales is not None,
    }
