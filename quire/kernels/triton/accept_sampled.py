"""Drafts that were drawn, after the draw that ignores them, whose statistics of p are used.

1. One read of the drafts' logits gives the maximum and the sum of exp of every chunk of the draft vocabulary.
2. Per position: is the draft accepted?
3. Of those that are not: the sum of max(p - q, 0) of every chunk of the vocabulary.
4. Per position: pick a chunk by its sum, and in it the token.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.accept_sampled import DrawnDrafts
from quire.kernels.philox import Purpose
from quire.kernels.sample_tokens import DrawParameters
from quire.kernels.triton.uniform import uniform

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = 1024


@triton.jit
def _draft_stats_kernel(
    drafts,  # [n]
    places,  # [n]
    draft_logits,  # [any, draft vocab]
    rows,  # [n]
    temperature,  # [rows]
    chunk_max,  # [n, chunks]
    chunk_sum,  # [n, chunks]
    vocab,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    if tl.load(drafts + i) >= 0:
        scale = LOG2E / tl.load(temperature + tl.load(rows + i))
        token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        source = draft_logits + tl.load(places + i) * vocab
        x = tl.load(source + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.max(x, 0)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        at = i * tl.num_programs(0) + tl.program_id(0)
        tl.store(chunk_max + at, largest)
        tl.store(chunk_sum + at, tl.sum(tl.exp2((x - base) * scale), 0))


@triton.jit
def _largest_and_sum(maxima, sums, count, scale, BLOCK: tl.constexpr):
    """Of a whole row, from those of its parts."""
    part = tl.arange(0, BLOCK)
    largest = tl.load(maxima + part, mask=part < count, other=-float("inf"))
    top = tl.max(largest, 0)
    shares = tl.load(sums + part, mask=part < count, other=0.0) * tl.exp2((largest - top) * scale)
    return top, tl.sum(shares, 0)


@triton.jit
def _q(source, draft_ids, token, here, draft_max, draft_sum, scale, HAS_IDS: tl.constexpr):
    """The probability of tokens as drafts."""
    if HAS_IDS:
        token = tl.load(draft_ids + token, mask=here, other=-1)
        here = here & (token >= 0)
    x = tl.load(source + token, mask=here, other=-float("inf")).to(tl.float32)
    return tl.exp2((x - draft_max) * scale) / draft_sum


@triton.jit
def _p(source, token, here, floor, top, total, scale):
    x = tl.load(source + token, mask=here, other=-float("inf")).to(tl.float32)
    return tl.where(x >= floor, tl.exp2((x - top) * scale) / total, 0.0)


@triton.jit
def _accept_kernel(
    logits,  # [n, vocab]
    stride,
    rows,  # [n]
    positions,  # [n]
    drafts,  # [n]
    places,  # [n]
    draft_logits,  # [any, draft vocab]
    draft_ids,  # [vocab]
    draft_vocab,
    temperature,  # [rows]
    seeds,  # [rows]
    piece_max,  # [n, pieces]
    piece_sum,  # [n, pieces]
    num_pieces,
    floors,  # [n]
    chunk_max,  # [n, chunks]
    chunk_sum,  # [n, chunks]
    num_chunks,
    norms,  # [n, 5]: what p and q of the position are computed with; nothing if the last is 0
    out,  # [n]
    PURPOSE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    WARPED: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    draft = tl.load(drafts + i)
    rejected = draft < -1  # false
    if draft >= 0:
        row = tl.load(rows + i).to(tl.int64)
        scale = LOG2E / tl.load(temperature + row)
        top, total = _largest_and_sum(piece_max + i * num_pieces, piece_sum + i * num_pieces, num_pieces, scale, PIECES)
        if (top > -float("inf")) & (top < float("inf")):  # else there is no token to draw
            draft_max, draft_sum = _largest_and_sum(
                chunk_max + i * num_chunks, chunk_sum + i * num_chunks, num_chunks, scale, CHUNKS
            )
            floor = -float("inf")
            if WARPED:
                floor = tl.load(floors + i)
            source = draft_logits + tl.load(places + i) * draft_vocab
            q = _q(source, draft_ids, draft, draft >= 0, draft_max, draft_sum, scale, HAS_IDS)
            p = _p(logits + i * stride, draft, draft >= 0, floor, top, total, scale)
            u = uniform(tl.load(seeds + row), tl.load(positions + i), PURPOSE)
            rejected = (u * q.to(tl.float64) < p.to(tl.float64)) == 0  # also if the draft's logits were NaN
            tl.store(out + i, draft, mask=rejected == 0)
            tl.store(norms + i * 5, top)
            tl.store(norms + i * 5 + 1, total)
            tl.store(norms + i * 5 + 2, draft_max)
            tl.store(norms + i * 5 + 3, draft_sum)
    tl.store(norms + i * 5 + 4, tl.where(rejected, 1.0, 0.0))


@triton.jit
def _residual(
    i,
    first,
    logits,
    stride,
    places,
    draft_logits,
    draft_ids,
    draft_vocab,
    floors,
    norms,
    scale,
    vocab,
    HAS_IDS: tl.constexpr,
    WARPED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """max(p - q, 0) of a chunk of the vocabulary."""
    token = first + tl.arange(0, CHUNK)
    here = token < vocab
    floor = -float("inf")
    if WARPED:
        floor = tl.load(floors + i)
    source = draft_logits + tl.load(places + i) * draft_vocab
    draft_max, draft_sum = tl.load(norms + i * 5 + 2), tl.load(norms + i * 5 + 3)
    q = _q(source, draft_ids, token, here, draft_max, draft_sum, scale, HAS_IDS)
    p = _p(logits + i * stride, token, here, floor, tl.load(norms + i * 5), tl.load(norms + i * 5 + 1), scale)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _residual_sums_kernel(
    logits,
    stride,
    rows,
    places,
    draft_logits,
    draft_ids,
    draft_vocab,
    temperature,
    floors,
    norms,
    sums,  # [n, chunks]
    vocab,
    HAS_IDS: tl.constexpr,
    WARPED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(1).to(tl.int64)
    if tl.load(norms + i * 5 + 4) > 0:
        scale = LOG2E / tl.load(temperature + tl.load(rows + i))
        chunk = tl.program_id(0)
        rest = _residual(
            i, chunk * CHUNK, logits, stride, places, draft_logits, draft_ids, draft_vocab, floors, norms, scale, vocab,
            HAS_IDS, WARPED, CHUNK,
        )  # fmt: skip
        tl.store(sums + i * tl.num_programs(0) + chunk, tl.sum(rest, 0))


@triton.jit
def _residual_pick_kernel(
    logits,
    stride,
    rows,
    positions,
    places,
    draft_logits,
    draft_ids,
    draft_vocab,
    temperature,
    seeds,
    floors,
    norms,
    sums,
    num_chunks,
    vocab,
    out,
    PURPOSE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    WARPED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if tl.load(norms + i * 5 + 4) > 0:
        row = tl.load(rows + i).to(tl.int64)
        scale = LOG2E / tl.load(temperature + row)
        chunk = tl.arange(0, CHUNKS)
        shares = tl.load(sums + i * num_chunks + chunk, mask=chunk < num_chunks, other=0.0).to(tl.float64)
        total = tl.sum(shares, 0)
        if total > 0:  # else p and q are equal but for rounding, and the token that was drawn without drafts stays
            cumulative = tl.cumsum(shares, 0)
            target = uniform(tl.load(seeds + row), tl.load(positions + i), PURPOSE) * total
            # Only what has weight counts, so that rounding never selects an impossible token.
            last = tl.max(tl.where(shares > 0, chunk, 0), 0)
            chosen = tl.min(tl.where((shares > 0) & (cumulative > target), chunk, last), 0)
            target -= tl.sum(tl.where(chunk < chosen, shares, 0.0), 0)
            rest = _residual(
                i, chosen * CHUNK, logits, stride, places, draft_logits, draft_ids, draft_vocab, floors, norms, scale,
                vocab, HAS_IDS, WARPED, CHUNK,
            ).to(tl.float64)  # fmt: skip
            offset = tl.arange(0, CHUNK)
            last = tl.max(tl.where(rest > 0, offset, 0), 0)
            found = tl.min(tl.where((rest > 0) & (tl.cumsum(rest, 0) > target), offset, last), 0)
            tl.store(out + i, chosen * CHUNK + found)


def accept_sampled(
    logits: torch.Tensor,  # [n, vocab]: before the temperature
    rows: torch.Tensor,
    positions: torch.Tensor,
    parameters: DrawParameters,
    drafts: DrawnDrafts,
    piece_max: torch.Tensor,  # [n, pieces]: of p, as the draw has them
    piece_sum: torch.Tensor,
    floors: torch.Tensor | None,  # [n], if there are filters
    out: torch.Tensor,  # [n]: as drawn without drafts
) -> None:
    n, vocab = logits.shape
    draft_vocab = drafts.logits.shape[1]
    assert drafts.logits.is_contiguous()
    chunks, draft_chunks = triton.cdiv(vocab, CHUNK), triton.cdiv(draft_vocab, CHUNK)
    chunk_max, chunk_sum = (torch.empty(n, draft_chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
    norms = torch.empty(n, 5, dtype=torch.float32, device=logits.device)
    sums = torch.empty(n, chunks, dtype=torch.float32, device=logits.device)
    has_ids, warped = drafts.draft_ids is not None, floors is not None
    ids = drafts.draft_ids if drafts.draft_ids is not None else drafts.tokens
    floors = floors if floors is not None else norms
    _draft_stats_kernel[(draft_chunks, n)](
        drafts.tokens, drafts.places, drafts.logits, rows, parameters.temperature, chunk_max, chunk_sum, draft_vocab,
        CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip
    _accept_kernel[(n,)](
        logits, logits.stride(0), rows, positions, drafts.tokens, drafts.places, drafts.logits, ids, draft_vocab,
        parameters.temperature, parameters.seeds, piece_max, piece_sum, piece_max.shape[1], floors, chunk_max,
        chunk_sum, draft_chunks, norms, out, PURPOSE=int(Purpose.ACCEPT), HAS_IDS=has_ids, WARPED=warped,
        PIECES=triton.next_power_of_2(piece_max.shape[1]), CHUNKS=triton.next_power_of_2(draft_chunks), num_warps=4,
    )  # fmt: skip
    _residual_sums_kernel[(chunks, n)](
        logits, logits.stride(0), rows, drafts.places, drafts.logits, ids, draft_vocab, parameters.temperature, floors,
        norms, sums, vocab, HAS_IDS=has_ids, WARPED=warped, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _residual_pick_kernel[(n,)](
        logits, logits.stride(0), rows, positions, drafts.places, drafts.logits, ids, draft_vocab,
        parameters.temperature, parameters.seeds, floors, norms, sums, chunks, vocab, out,
        PURPOSE=int(Purpose.RESIDUAL), HAS_IDS=has_ids, WARPED=warped, CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
