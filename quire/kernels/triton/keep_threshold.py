"""The lowest logit that min-p, top-k and top-p keep, without a sort.

Both conditions grow as the threshold falls: top-k wants k tokens at or above it, top-p a share of their mass. So the
threshold is found by bisection over the values a float can have, exactly, ties included.

First over the pieces' maxima: k pieces whose maxima reach v hold k tokens that do, so the k-th largest maximum is a
lower bound (for top-p alike: the maxima's mass). The pieces that reach the bound are few, unless the distribution is
flat, and hold all tokens that matter: the second bisection runs over these alone.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.sample_tokens import DrawParameters

LOG2E = tl.constexpr(1.4426950408889634)

TILE = 8192  # logits handled at once
# Low bits that are equal in every float32 converted from a dtype need no search.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _key(x, SPARE: tl.constexpr):
    """An integer with the order of the float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@triton.jit
def _value(key, SPARE: tl.constexpr):
    bits = (key << SPARE) | tl.where(key < 0, (1 << SPARE) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Rounded up, without overflow of low + high."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


@triton.jit
def _load_tile(source, candidates, start, count, vocab, PIECE: tl.constexpr, TILE: tl.constexpr):
    """The logits of TILE // PIECE candidates, and which pieces these are."""
    slot = start + tl.arange(0, TILE // PIECE)
    piece = tl.load(candidates + slot, mask=slot < count, other=0)
    token = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    here = (slot < count)[:, None] & (token < vocab)
    return tl.load(source + token, mask=here, other=-float("inf")).to(tl.float32), piece, slot < count


@triton.jit
def _reaching(
    source, candidates, count, vocab, v, top, scale, MASS: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr
):
    """The number of logits that are at least v, or their probability mass."""
    found = tl.zeros([TILE // PIECE], tl.float32)
    for start in range(0, count, TILE // PIECE):
        x, _, _ = _load_tile(source, candidates, start, count, vocab, PIECE, TILE)
        if MASS:
            found += tl.sum(tl.where(x >= v, tl.exp2((x - top) * scale), 0.0), 1)
        else:
            found += tl.sum(tl.where(x >= v, 1.0, 0.0), 1)
    return tl.sum(found, 0)


@triton.jit
def _highest(
    source,
    candidates,
    count,
    vocab,
    wanted,
    least,
    top,
    scale,
    MASS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The highest v that `wanted` tokens, or that much mass, reach; `least` if none does."""
    low, high = _key(least, SPARE), _key(top, SPARE)
    while low < high:
        middle = _middle(low, high)
        v = _value(middle, SPARE)
        if _reaching(source, candidates, count, vocab, v, top, scale, MASS, PIECE, TILE) >= wanted:
            low = middle
        else:
            high = middle - 1
    return tl.maximum(_value(low, SPARE), least)


@triton.jit
def _keep_kernel(
    logits,  # [n, vocab]
    stride,
    rows,  # [n]
    piece_max,  # [n, pieces]
    piece_sum,  # [n, pieces]: becomes the sum over the tokens that are kept
    floors,  # [n]
    candidates,  # [n, pieces]
    temperature,  # by row from here
    greedy,
    top_k,
    top_p,
    log_min_p,
    vocab,
    num_pieces,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPARE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        tl.store(floors + i, -float("inf"))
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        log_least_p = tl.load(log_min_p + row)
        has_min_p = log_least_p > -float("inf")
        limited = (k > 0) & (k < vocab)
        needs_threshold = (limited | has_min_p | (p < 1.0)) & (tl.load(greedy + row) == 0)
        piece = tl.arange(0, BLOCK)
        exists = piece < num_pieces
        piece_max += i * num_pieces
        piece_sum += i * num_pieces
        candidates += i * num_pieces
        largest = tl.load(piece_max + piece, mask=exists, other=-float("inf"))
        top = tl.max(largest, 0)
        if needs_threshold & (top > -float("inf")) & (top < float("inf")):
            scale = LOG2E / tl.load(temperature + row)
            shares = tl.exp2((largest - top) * scale)
            sums = tl.load(piece_sum + piece, mask=exists, other=0.0)
            mass = tl.sum(sums * shares, 0)
            least = tl.where(has_min_p, top + log_least_p * tl.load(temperature + row), -float("inf"))

            # A lower bound from the pieces' maxima. Min-p is a bound by itself, and the only one if top-p follows it
            # directly: top-p then needs the mass of all tokens that min-p keeps.
            wanted = tl.where(limited, k.to(tl.float32), p * mass)
            weights = tl.where(limited, tl.where(largest > -float("inf"), 1.0, 0.0), shares)
            if (limited | (p < 1.0)) & (limited | (has_min_p == 0)) & (tl.sum(weights, 0) >= wanted):
                lowest = tl.min(tl.where(largest > -float("inf"), largest, top), 0)
                low, high = _key(lowest, SPARE), _key(top, SPARE)
                while low < high:
                    middle = _middle(low, high)
                    if tl.sum(tl.where(largest >= _value(middle, SPARE), weights, 0.0), 0) >= wanted:
                        low = middle
                    else:
                        high = middle - 1
                least = tl.maximum(least, _value(low, SPARE))

            chosen = (largest >= least) & (largest > -float("inf"))
            count = tl.sum(chosen.to(tl.int32), 0)
            tl.store(candidates + tl.cumsum(chosen.to(tl.int32), 0) - 1, piece, mask=chosen)
            tl.debug_barrier()  # the list is read by other threads than those that wrote it

            source = logits + i * stride
            if limited:
                least = _highest(source, candidates, count, vocab, wanted, least, top, scale, False, PIECE, TILE, SPARE)
            if p < 1.0:
                if limited | has_min_p:
                    mass = _reaching(source, candidates, count, vocab, least, top, scale, True, PIECE, TILE)
                least = _highest(
                    source, candidates, count, vocab, p * mass, least, top, scale, True, PIECE, TILE, SPARE
                )

            tl.store(floors + i, least)
            tl.store(piece_sum + piece, tl.zeros([BLOCK], tl.float32), mask=exists & (chosen == 0))
            for start in range(0, count, TILE // PIECE):
                x, own, here = _load_tile(source, candidates, start, count, vocab, PIECE, TILE)
                base = tl.load(piece_max + own, mask=here, other=0.0)
                kept = tl.where(x >= least, tl.exp2((x - base[:, None]) * scale), 0.0)
                tl.store(piece_sum + own, tl.sum(kept, 1), mask=here)


def keep_threshold(
    logits: torch.Tensor,  # [n, vocab]
    rows: torch.Tensor,  # [n]
    piece_max: torch.Tensor,  # [n, pieces] float32
    piece_sum: torch.Tensor,  # [n, pieces] float32: of exp((x - its piece's max) / temperature); changed in place
    parameters: DrawParameters,
    piece: int,  # logits in a piece
) -> torch.Tensor:
    """[n] float32, -inf for rows that keep all tokens."""
    n, vocab = logits.shape
    num_pieces = piece_max.shape[1]
    block = triton.next_power_of_2(num_pieces)
    floors = torch.empty(n, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(n, num_pieces, dtype=torch.int32, device=logits.device)
    _keep_kernel[(n,)](
        logits,
        logits.stride(0),
        rows,
        piece_max,
        piece_sum,
        floors,
        candidates,
        parameters.temperature,
        parameters.greedy,
        parameters.top_k,
        parameters.top_p,
        parameters.log_min_p,
        vocab,
        num_pieces,
        PIECE=piece,
        BLOCK=block,
        TILE=max(piece, min(TILE, block * piece)),
        SPARE=SPARE_BITS[logits.dtype],
        num_warps=16,
    )
    return floors
