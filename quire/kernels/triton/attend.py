"""The loop that all attention kernels share: softmax over tiles of keys, computed as they come."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


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
    LOG2: tl.constexpr = 1.4426950408889634
    # Plain scores are scaled in the one multiply-add that the exponential needs anyway; scale > 0.
    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI)
    factor = scale * LOG2 if PLAIN else LOG2
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
        if not PLAIN:
            scores *= scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        if ALIBI:
            scores += slope[:, None] * (keys[None, :] - q_pos[:, None]).to(tl.float32)
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
