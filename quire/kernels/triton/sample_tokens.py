"""A draw in two passes, or three with top-k, top-p or min-p.

1. One read of the logits gives the maximum and the sum of exp of every piece of the vocabulary.
2. With a threshold (`keep_threshold`): find it, and restrict the sums to the tokens that are kept.
3. Per row: pick a piece by its sum, or the one with the maximum, and in it the token.

The result of a row depends neither on the batch's size nor on the order of programs, so a padded step gives the same
tokens. Logits are compared undivided; the temperature is applied only in the exponent.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.sample_tokens import Draw, DrawParameters, TokenRows
from quire.kernels.triton.keep_threshold import keep_threshold

LOG2E = tl.constexpr(1.4426950408889634)

CHUNK = 1024  # logits that one warp reads at a time: one reduction without shared memory
SMALL_PIECE = 32  # the threshold looks at single pieces, so they are small
MAX_PIECES = 8192  # of a row with a threshold; a larger vocabulary gets larger pieces
TARGET_PROGRAMS = 8192  # enough to fill any GPU; beyond, a program reads several chunks


@triton.jit(do_not_specialize=["per_program"])
def _piece_stats_kernel(
    logits,  # [n, vocab]
    stride,
    rows,  # [n]
    temperature,  # [rows]
    piece_max,  # [n, pieces]
    piece_sum,  # [n, pieces]
    vocab,
    num_pieces,
    per_program,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    SUMS: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        PIECES: tl.constexpr = CHUNK // PIECE
        if SUMS:
            scale = LOG2E / tl.load(temperature + row)
        own = tl.arange(0, PIECES)
        token = own[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        source = logits + i * stride
        first = tl.program_id(0) * per_program
        start = first * CHUNK
        ahead = tl.load(source + start + token, mask=start + token < vocab, other=-float("inf"))
        for chunk in range(first, first + per_program):
            x = ahead.to(tl.float32)
            start = (chunk + 1) * CHUNK
            more = chunk + 1 < first + per_program
            ahead = tl.load(source + start + token, mask=more & (start + token < vocab), other=-float("inf"))
            x = tl.where(x != x, float("inf"), x)  # a maximum would lose NaN
            largest = tl.max(x, 1)
            piece = chunk * PIECES + own
            tl.store(piece_max + i * num_pieces + piece, largest, mask=piece < num_pieces)
            if SUMS:
                base = tl.where(largest == -float("inf"), 0.0, largest)
                total = tl.sum(tl.exp2((x - base[:, None]) * scale), 1)
                tl.store(piece_sum + i * num_pieces + piece, total, mask=piece < num_pieces)


@triton.jit
def _uniform(seed, position):
    """philox_uniform of one row, for Purpose.SAMPLE."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    bits = (c0.to(tl.int64) << 21) | (c1.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _first(holds, index, none):
    return tl.min(tl.where(holds, index, none), 0)


@triton.jit
def _at(values, index, place):
    return tl.sum(tl.where(index == place, values, 0.0), 0)


@triton.jit(do_not_specialize=["tokens_stride", "max_len"])
def _pick_kernel(
    logits,  # [n, vocab]
    stride,
    rows,  # [n]
    positions,  # [n], or [rows] when the token is appended
    out,  # [n]
    piece_max,  # [n, pieces]
    piece_sum,  # [n, pieces]
    floors,  # [n]
    temperature,  # by row from here
    greedy,
    seeds,
    token_ids,
    num_tokens,
    num_computed,
    tokens_stride,
    max_len,
    vocab,
    num_pieces,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANDOM: tl.constexpr,
    WARPED: tl.constexpr,
    APPEND: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        piece = tl.arange(0, BLOCK)
        exists = piece < num_pieces
        largest = tl.load(piece_max + i * num_pieces + piece, mask=exists, other=-float("inf"))
        top = tl.max(largest, 0)
        finite = (top > -float("inf")) & (top < float("inf"))
        chosen = _first(largest == top, piece, BLOCK - 1)

        if RANDOM:
            is_greedy = tl.load(greedy + row) != 0
            scale = LOG2E / tl.load(temperature + row)
            sums = tl.load(piece_sum + i * num_pieces + piece, mask=exists, other=0.0)
            shares = (sums * tl.exp2((largest - top) * scale)).to(tl.float64)
            cumulative = tl.cumsum(shares, 0)
            position = tl.load(positions + (row if APPEND else i))
            target = _uniform(tl.load(seeds + row), position) * tl.sum(shares, 0)
            # Only pieces with mass count, so that rounding never selects an impossible token.
            possible = shares > 0
            last = tl.max(tl.where(possible, piece, 0), 0)
            drawn = tl.minimum(_first(possible & (cumulative > target), piece, BLOCK), last)
            chosen = tl.where(is_greedy, chosen, drawn)
            rest = target - _at(cumulative - shares, piece, chosen)
            base = _at(largest, piece, chosen)

        offset = tl.arange(0, PIECE)
        token = chosen * PIECE + offset
        x = tl.load(logits + i * stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        place = _first(x == top, offset, 0x7FFFFFFF)
        if RANDOM:
            each = tl.exp2((x - base) * scale)
            if WARPED:
                each = tl.where(x >= tl.load(floors + i), each, 0.0)
            rest = rest / tl.exp2((base - top) * scale).to(tl.float64)
            within = each > 0
            last = tl.max(tl.where(within, offset, 0), 0)
            reached = within & (tl.cumsum(each.to(tl.float64), 0) > rest)
            place = tl.where(is_greedy, place, tl.minimum(_first(reached, offset, 0x7FFFFFFF), last))
        result = tl.where(finite, chosen * PIECE + place, -1)
        tl.store(out + i, result)

        if APPEND:
            known = tl.load(num_tokens + row)
            if tl.load(num_computed + row) == known:
                at = tl.minimum(known, max_len - 1)
                tl.store(token_ids + row * tokens_stride + at, tl.maximum(result, 0))
                tl.store(num_tokens + row, known + 1)


def piece_size(vocab: int, draw: Draw) -> int:
    if draw < Draw.WARPED:
        return CHUNK
    return max(SMALL_PIECE, triton.next_power_of_2(triton.cdiv(vocab, MAX_PIECES)))


def piece_stats(
    logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, piece: int, sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, pieces] float32: of every piece its maximum, and its sum of exp((x - maximum) / temperature)."""
    n, vocab = logits.shape
    chunk = max(CHUNK, piece)
    num_chunks = triton.cdiv(vocab, chunk)
    num_pieces = num_chunks * (chunk // piece)
    piece_max = torch.empty(n, num_pieces, dtype=torch.float32, device=logits.device)
    piece_sum = torch.empty_like(piece_max) if sums else piece_max
    per_program = triton.cdiv(n * num_chunks, TARGET_PROGRAMS)
    _piece_stats_kernel[(triton.cdiv(num_chunks, per_program), n)](
        logits,
        logits.stride(0),
        rows,
        temperature,
        piece_max,
        piece_sum,
        vocab,
        num_pieces,
        per_program,
        CHUNK=chunk,
        PIECE=piece,
        SUMS=sums,
        num_warps=1,
    )
    return piece_max, piece_sum


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,  # [n]; with `state`, its num_tokens
    state: TokenRows | None,
    parameters: DrawParameters,
    draw: Draw,
    out: torch.Tensor,
) -> None:
    n, vocab = logits.shape
    if not n:
        return
    assert logits.stride(1) == 1
    random, warped = draw >= Draw.RANDOM, draw >= Draw.WARPED
    piece = piece_size(vocab, draw)
    piece_max, piece_sum = piece_stats(logits, rows, parameters.temperature, piece, random)
    floors = keep_threshold(logits, rows, piece_max, piece_sum, parameters, piece) if warped else piece_max
    num_pieces = piece_max.shape[1]
    block = triton.next_power_of_2(num_pieces)
    _pick_kernel[(n,)](
        logits,
        logits.stride(0),
        rows,
        positions,
        out,
        piece_max,
        piece_sum,
        floors,
        parameters.temperature,
        parameters.greedy,
        parameters.seeds,
        state.token_ids if state is not None else out,
        state.num_tokens if state is not None else out,
        state.num_computed if state is not None else out,
        state.token_ids.stride(0) if state is not None else 0,
        state.token_ids.shape[1] if state is not None else 0,
        vocab,
        num_pieces,
        PIECE=piece,
        BLOCK=block,
        RANDOM=random,
        WARPED=warped,
        APPEND=state is not None,
        num_warps=16 if block >= 4096 else 4,
    )
