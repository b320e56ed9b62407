"""The loop that all attention kernels share: softmax over tiles of keys, computed as they come."""

import triton
import triton.language as tl

from quire.kernels.paged_attention import AttentionFeatures

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [M, DP], in the compute dtype
    acc,  # [M, DP] float32
    most,  # [M] float32: the greatest score so far, in powers of two
    total,  # [M] float32: the sum of weights so far
    kv_cache,  # [blocks, 2, KV, BLOCK_SIZE, D]
    pages,  # the row's block table
    kv_head,
    begin,  # first key
    end,  # one past the last key
    q_pos,  # [M]: keys after it are hidden
    slope,  # [M]: ALiBi's, or unused
    scale,
    softcap,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False: every key from begin to end is seen by every query, and fills whole tiles
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    # Plain scores are scaled in the one multiply-add that the exponential needs anyway; scale > 0. Others become powers
    # of two by what is done to them.
    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI)
    factor = scale * LOG2E if PLAIN else 1.0
    if SOFTCAP:
        twice, cap = 2.0 * LOG2E * scale / softcap, softcap * LOG2E
    columns = tl.arange(0, DP)
    in_head = columns < D
    for tile in range(begin, end, TILE):
        keys = tile + tl.arange(0, TILE)
        inside = keys < end
        block = tl.load(pages + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = (block * 2 * KV + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        k_at = kv_cache + place[None, :] * D + columns[:, None]
        v_at = kv_cache + (place + KV * BLOCK_SIZE)[:, None] * D + columns[None, :]
        if MASKED or D != DP:
            k = tl.load(k_at, mask=inside[None, :] & in_head[:, None], other=0.0).to(q.dtype)
        else:
            k = tl.load(k_at).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
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
        new_most = tl.maximum(most, tl.max(scores, 1) * factor)
        # A row that has seen no key yet has -inf, and -inf - -inf is no number.
        base = tl.where(new_most == float("-inf"), 0.0, new_most) if MASKED else new_most
        weights = tl.math.exp2(scores * factor - base[:, None])
        shrink = tl.math.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED or D != DP:
            v = tl.load(v_at, mask=inside[:, None] & in_head[None, :], other=0.0).to(q.dtype)
        else:
            v = tl.load(v_at).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = new_most
    return acc, most, total


@triton.jit
def start(sinks, head, real, M: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr):
    """What `attend` begins with: nothing seen, or a sink, which is like one key seen whose value is nothing."""
    acc = tl.zeros([M, DP], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        most = tl.load(sinks + head, mask=real, other=float("-inf")) * LOG2E
        total = tl.where(real, 1.0, 0.0)
    return acc, most, total


def feature_flags(features: AttentionFeatures) -> dict[str, bool]:
    """What kernels leave out where a layer has no need of it."""
    return {
        "SOFTCAP": features.softcap is not None,
        "ALIBI": features.slopes is not None,
        "SINKS": features.sinks is not None,
    }
