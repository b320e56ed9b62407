"""The low-rank terms of adapters: every row's inner products by A, then the sum with their product by B.

Tokens are sorted by adapter once a step, each adapter's padded to whole tiles, so that a tile has one. As many programs
are launched as the worst distribution needs; those without a tile return at once, as do tiles of a slot whose adapter
leaves the layer as it is.

One or two rows need no launch more: the first programs of the base's product are `shrink_row`, the next `expand_row`,
and all others add to their outputs what these have written meanwhile (`values_of`).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch

TOKENS = 1024  # of a program at once
TILES = 64
OUTPUTS = 128
RANKS = 32  # at once
PROGRAMS = 800  # that an expansion has left when each has more than one block of outputs
ROW_SPLITS = 16  # of the inputs of a single row
ROW_INPUTS = 512  # of a split, or more
ROW_RANKS = 16  # at once
ROW_FACTORS = 256  # of A, or of B, that a warp has of a single row's


@dataclass(frozen=True)
class Tiling:
    """How so many tokens are divided. A row's bits depend on this and on its adapter, not on the other rows."""

    most: int  # tokens
    rows: int  # of a tile
    splits: int  # of the inputs, so that few tiles occupy more than a few multiprocessors
    inputs: int  # at once
    stages: int


TILINGS = (Tiling(256, 16, 16, 256, 2), Tiling(2048, 64, 4, 64, 4), Tiling(1 << 30, 64, 1, 64, 4))
TOKEN_COUNTS = tuple(tiling.most + 1 for tiling in TILINGS[:-1])  # at which kernels change


@dataclass(frozen=True)
class GroupedTokens:
    """Of one adapter in every tile."""

    order: torch.Tensor  # [tiles * rows] int32: the token at each position, -1 for none
    tile_slots: torch.Tensor  # [tiles] int32; -1 for tiles that are not used, -2 for tokens without an adapter
    num_tokens: int
    tiling: Tiling


@triton.jit(do_not_specialize=["num_tokens"])
def _slots_kernel(rows, token_rows, row_slots, out, step, num_tokens, DECODE_ONLY: tl.constexpr, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    place = token
    if not DECODE_ONLY:
        place = tl.load(token_rows + token, mask=inside, other=-1)
    row = tl.load(rows + place, mask=inside & (place >= 0), other=-1)
    tl.store(out + token, tl.load(row_slots + row, mask=row >= 0, other=-1), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _group_kernel(
    slots,  # [num_tokens]
    cursors,  # [SLOTS]: to work in
    order,
    tile_slots,
    num_tokens,
    num_tiles,
    SLOTS: tl.constexpr,  # more than there are: the last one counts tokens without an adapter
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    s = tl.arange(0, SLOTS)
    counts = tl.zeros([SLOTS], tl.int32)
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        counts += tl.histogram(tl.where(slot < 0, SLOTS - 1, slot), SLOTS)
    counts -= tl.where(s == SLOTS - 1, tl.cdiv(num_tokens, TOKENS) * TOKENS - num_tokens, 0)
    own = (counts + ROWS - 1) // ROWS
    end = tl.cumsum(own, 0)
    begin = end - own
    tl.store(cursors + s, begin * ROWS)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (begin[None, :] <= tile[:, None]) & (tile[:, None] < end[None, :])
        slot = tl.where(s == SLOTS - 1, -2, s)
        tl.store(tile_slots + tile, tl.sum(tl.where(inside, slot[None, :] + 1, 0), 1) - 1, mask=tile < num_tiles)
    for first in range(0, num_tiles * ROWS, TOKENS):
        position = first + tl.arange(0, TOKENS)
        tl.store(order + position, tl.full([TOKENS], -1, tl.int32), mask=position < num_tiles * ROWS)
    tl.debug_barrier()
    one = tl.full([TOKENS], 1, tl.int32)
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        # In any order: it decides the row in a tile, but not one bit of the result.
        of_slot = cursors + tl.where(slot < 0, SLOTS - 1, slot)
        position = tl.atomic_add(of_slot, one, mask=token < num_tokens, sem="relaxed")
        tl.store(order + position, token, mask=token < num_tokens)


@triton.jit(do_not_specialize=["positions"])
def _shrink_kernel(
    x,
    order,
    tile_slots,
    ranks,
    a,  # [slots, width, inputs]
    inner,  # [splits, positions, width]
    x_stride,
    positions,
    width,  # parts * rank
    num_inputs,
    per_split,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    if tl.load(ranks + slot) == 0:
        return
    position = tile * ROWS + tl.arange(0, ROWS)
    # What a tile lacks is another row's once more, and never read: cheaper than a mask.
    token = tl.maximum(tl.load(order + position), 0).to(tl.int64)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    of_x = x + token[:, None] * x_stride
    of_a = a + (slot.to(tl.int64) * width + tl.minimum(column, width - 1))[:, None] * num_inputs
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = split * per_split
    for first in tl.range(begin, tl.minimum(begin + per_split, num_inputs), INPUTS, num_stages=STAGES):
        k = first + tl.arange(0, INPUTS)[None, :]
        if EVEN:
            xs = tl.load(of_x + k)
            weights = tl.load(of_a + k)
        else:
            xs = tl.load(of_x + k, mask=k < num_inputs, other=0.0)
            weights = tl.load(of_a + k, mask=k < num_inputs, other=0.0)
        found = tl.dot(xs, tl.trans(weights), found, input_precision="ieee")
    at = (split.to(tl.int64) * positions + position)[:, None] * width + column[None, :]
    tl.store(inner + at, found, mask=(column < width)[None, :])


@triton.jit
def _tile(order, tile_slots, ranks, ROWS: tl.constexpr, PDL: tl.constexpr):
    """A program's tile: its slot, the rank of that one's adapter, positions and tokens. They are from before the kernel
    whose end is waited for."""
    tile = tl.program_id(1)
    slot = tl.load(tile_slots + tile)
    position = tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(order + position)
    own_rank = tl.load(ranks + tl.maximum(slot, 0))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    return slot, own_rank, position, token


@triton.jit(do_not_specialize=["positions", "second", "third", "each"])
def _expand_kernel(
    inner,
    order,
    tile_slots,
    ranks,
    b,  # [slots, outputs, rank]
    out,
    positions,
    width,
    num_outputs,
    rank,
    second,  # where the second part of the outputs begins
    third,
    each,  # outputs of a program, all of one part
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ALIGNED: tl.constexpr,  # outputs that parts and their number are multiples of
    RANKS: tl.constexpr,
    ONE_STEP: tl.constexpr,  # RANKS are all
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    slot, own_rank, position, token = _tile(order, tile_slots, ranks, ROWS, PDL)
    if slot < 0:
        return
    if own_rank == 0:
        return
    group = tl.program_id(0)
    to_second = tl.cdiv(second, each)
    to_third = to_second + tl.cdiv(third - second, each)
    part, begin, end = 0, group * each, second
    if group >= to_third:
        part, begin, end = 2, third + (group - to_third) * each, num_outputs
    elif group >= to_second:
        part, begin, end = 1, second + (group - to_second) * each, third
    end = tl.multiple_of(tl.minimum(begin + each, end), ALIGNED)  # or a store would be of single elements
    of_inner = inner + position.to(tl.int64)[:, None] * width + part * rank
    of_out = out + tl.maximum(token, 0).to(tl.int64)[:, None] * num_outputs
    of_b = b + slot.to(tl.int64) * num_outputs * rank
    if ONE_STEP:
        of_rows = _sum_of_splits(of_inner, positions, width, rank, 0, SPLITS, ROWS, RANKS).to(b.dtype.element_ty)
    for first in tl.range(begin, end, OUTPUTS, num_stages=STAGES):
        column = tl.max_contiguous(tl.multiple_of(first + tl.arange(0, OUTPUTS), ALIGNED), OUTPUTS)
        real = column < end
        if ALIGNED == OUTPUTS:
            before = tl.load(of_out + column[None, :])
        else:
            before = tl.load(of_out + column[None, :], mask=real[None, :], other=0.0)
        if ONE_STEP:
            weights = _factors(of_b, column, rank, 0, real, ALIGNED == OUTPUTS, RANKS)
            term = tl.dot(of_rows, tl.trans(weights), input_precision="ieee")
        else:
            term = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for of_ranks in range(0, own_rank, RANKS):
                weights = _factors(of_b, column, rank, of_ranks, real, ALIGNED == OUTPUTS, RANKS)
                found = _sum_of_splits(of_inner, positions, width, rank, of_ranks, SPLITS, ROWS, RANKS)
                term = tl.dot(found.to(weights.dtype), tl.trans(weights), term, input_precision="ieee")
        after = (before.to(tl.float32) + term).to(before.dtype)
        tl.store(of_out + column[None, :], after, mask=(token >= 0)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["positions", "each"])
def _expand_gated_kernel(
    inner,
    order,
    tile_slots,
    ranks,
    b,  # [slots, 2 * columns, rank]
    gate_up,  # [tokens, 2 * columns]: the base's, gate before up
    out,  # [tokens, columns]
    positions,
    num_columns,
    rank,
    each,  # columns of a program
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,  # columns that their number is a multiple of
    RANKS: tl.constexpr,  # all
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(gate) * up of all tokens, after the terms of those that have an adapter."""
    slot, own_rank, position, token = _tile(order, tile_slots, ranks, ROWS, PDL)
    if slot == -1:
        return
    begin = tl.program_id(0) * each
    end = tl.multiple_of(tl.minimum(begin + each, num_columns), ALIGNED)
    row = tl.maximum(token, 0).to(tl.int64)[:, None]
    of_gate, of_out = gate_up + row * 2 * num_columns, out + row * num_columns
    if (slot >= 0) & (own_rank > 0):
        of_inner = inner + position.to(tl.int64)[:, None] * 2 * rank
        of_b = b + slot.to(tl.int64) * 2 * num_columns * rank
        kind: tl.constexpr = b.dtype.element_ty
        gates = _sum_of_splits(of_inner, positions, 2 * rank, rank, 0, SPLITS, ROWS, RANKS).to(kind)
        ups = _sum_of_splits(of_inner + rank, positions, 2 * rank, rank, 0, SPLITS, ROWS, RANKS).to(kind)
        for first in tl.range(begin, end, COLUMNS, num_stages=STAGES):
            column = tl.max_contiguous(tl.multiple_of(first + tl.arange(0, COLUMNS), ALIGNED), COLUMNS)
            real = column < end
            gate, up = _gate_and_up(of_gate, column, real, num_columns, ALIGNED == COLUMNS)
            weights = _factors(of_b, column, rank, 0, real, ALIGNED == COLUMNS, RANKS)
            gate = (gate + tl.dot(gates, tl.trans(weights), input_precision="ieee")).to(out.dtype.element_ty)
            weights = _factors(of_b + num_columns * rank, column, rank, 0, real, ALIGNED == COLUMNS, RANKS)
            up = (up + tl.dot(ups, tl.trans(weights), input_precision="ieee")).to(out.dtype.element_ty)
            _store_gated(of_out, gate.to(tl.float32), up.to(tl.float32), column, token, real)
    else:
        for first in tl.range(begin, end, COLUMNS, num_stages=STAGES):
            column = tl.max_contiguous(tl.multiple_of(first + tl.arange(0, COLUMNS), ALIGNED), COLUMNS)
            real = column < end
            gate, up = _gate_and_up(of_gate, column, real, num_columns, ALIGNED == COLUMNS)
            _store_gated(of_out, gate, up, column, token, real)


@triton.jit
def _gate_and_up(of_gate, column, real, num_columns, EVEN: tl.constexpr):
    at = of_gate + column[None, :]
    gate = tl.load(at) if EVEN else tl.load(at, mask=real[None, :], other=0.0)
    up = tl.load(at + num_columns) if EVEN else tl.load(at + num_columns, mask=real[None, :], other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_gated(of_out, gate, up, column, token, real):
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(of_out + column[None, :], found.to(of_out.dtype.element_ty), mask=(token >= 0)[:, None] & real[None, :])


@triton.jit
def _sum_of_splits(
    of_inner, positions, width, rank, first, SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr
):
    r = first + tl.arange(0, RANKS)[None, :]
    found = tl.zeros([ROWS, RANKS], tl.float32)
    for split in tl.static_range(SPLITS):
        at = of_inner + split * positions.to(tl.int64) * width + r
        found += tl.load(at, mask=r < rank, other=0.0)
    return found


@triton.jit
def _factors(of_b, column, rank, first, real, EVEN: tl.constexpr, RANKS: tl.constexpr):
    r = first + tl.arange(0, RANKS)[None, :]
    at = of_b + column[:, None] * rank + r
    return tl.load(at, mask=r < rank if EVEN else (r < rank) & real[:, None], other=0.0)


@triton.jit
def shrink_row(
    unit,  # a program's row, group of columns and split
    x,  # [rows, inputs]
    gain,  # [inputs] of a norm of x
    slots,
    step,
    ranks,
    a,  # [slots, width, inputs]
    inner,  # [rows, splits, width] words
    x_stride,
    splits,
    width,
    num_inputs,
    INPUTS: tl.constexpr,  # of a split
    RANKS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's inner products by A, for `expand_row`."""
    split, groups = unit % splits, tl.cdiv(width, RANKS)
    column = (unit // splits) % groups * RANKS + tl.arange(0, RANKS)
    row = unit // (splits * groups)
    k = split * INPUTS + tl.arange(0, INPUTS)
    # What the row's slot was when this kernel began, most likely still is. A is loaded before x is there.
    slot, own_rank, weights = _adapter_of(slots + row, ranks, a, column, k, width, num_inputs, EVEN)
    if HAS_GAIN:
        factor = tl.load(gain + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    now = tl.load(slots + row, volatile=True)
    now_step = tl.load(step)
    values = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    if now != slot:
        slot, own_rank, weights = _adapter_of(slots + row, ranks, a, column, k, width, num_inputs, EVEN)
    if HAS_GAIN:
        values *= factor
    found = tl.where(own_rank > 0, tl.sum(weights.to(tl.float32) * values[None, :], 1), 0.0)
    tl.store(inner + (row * splits + split) * width + column, _word(found, now_step), mask=column < width)


@triton.jit
def _adapter_of(of_row, ranks, a, column, k, width, num_inputs, EVEN: tl.constexpr):
    """The slot of a row, the rank of its adapter, 0 if there is none, and columns of A."""
    slot = tl.load(of_row, volatile=True)
    used = tl.maximum(slot, 0)
    own_rank = tl.where(slot >= 0, tl.load(ranks + used, volatile=True), 0)
    at = a + (used.to(tl.int64) * width + tl.minimum(column, width - 1))[:, None] * num_inputs + k[None, :]
    weights = tl.load(at) if EVEN else tl.load(at, mask=(k < num_inputs)[None, :], other=0.0)
    return slot, own_rank, weights


@triton.jit
def expand_row(
    unit,  # a program's row and block of outputs
    slots,
    step,
    ranks,
    b,  # [slots, outputs, rank]
    inner,
    terms,  # [rows, outputs] words
    num_outputs,
    splits,
    width,
    rank,
    second,
    third,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """B times a row's inner products, for all programs that compute these outputs."""
    blocks = tl.cdiv(num_outputs, OUTPUTS)
    row, first = unit // blocks, unit % blocks * OUTPUTS
    n = first + tl.arange(0, OUTPUTS)
    slot = tl.load(slots + row, volatile=True)
    weights = _row_factors(n, slot, b, num_outputs, rank, 0, RANKS)  # before x is there
    if PDL:
        gdc_wait()
    now = tl.load(slots + row, volatile=True)
    now_step = tl.load(step)
    if now != slot:
        weights = _row_factors(n, now, b, num_outputs, rank, 0, RANKS)
    total = tl.zeros([OUTPUTS], tl.float32)
    own_rank = 0
    if now >= 0:
        own_rank = tl.load(ranks + now)
    if own_rank > 0:
        of_column, first_part = _part_of(n, second, third), _part_of(first, second, third)
        for part in range(first_part, _part_of(first + OUTPUTS - 1, second, third) + 1):
            if part * rank < width:
                for of_ranks in range(0, own_rank, RANKS):
                    if (of_ranks > 0) | (part > first_part):
                        weights = _row_factors(n, now, b, num_outputs, rank, of_ranks, RANKS)
                    r, split = of_ranks + tl.arange(0, RANKS), tl.arange(0, SPLITS)
                    at = inner + (row * splits + tl.minimum(split, splits - 1)[:, None]) * width + part * rank
                    at += tl.minimum(r, rank - 1)[None, :]
                    products = values_of(tl.load(at, volatile=True), at, now_step)
                    products = tl.where((split < splits)[:, None] & (r < rank)[None, :], products, 0.0)
                    term = tl.sum(weights.to(tl.float32) * tl.sum(products, 0)[None, :], 1)
                    total += tl.where(of_column == part, term, 0.0)
    tl.store(terms + row * num_outputs + n, _word(total, now_step), mask=n < num_outputs)


@triton.jit
def _part_of(column, second, third):
    return (column >= second).to(tl.int32) + (column >= third).to(tl.int32)


@triton.jit
def _row_factors(n, slot, b, num_outputs, rank, first, RANKS: tl.constexpr):
    r = first + tl.arange(0, RANKS)
    of_b = b + (tl.maximum(slot, 0).to(tl.int64) * num_outputs + tl.minimum(n, num_outputs - 1)) * rank
    return tl.load(of_b[:, None] + r[None, :], mask=(r < rank)[None, :], other=0.0)


@triton.jit
def _word(value, step):
    """With the step beside it, in eight bytes that are written at once: who reads it sees whether it is there."""
    return (step.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def values_of(words, at, step):
    """What other programs of the launch write. `words` were loaded before; as long as some are of another step, all are
    loaded again. The programs that write are the first of the launch, and wait for none behind them."""
    while tl.max(((words >> 32) != step).to(tl.int32)) > 0:
        words = tl.load(at, volatile=True)
    return (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


def write_slots_of_tokens(
    out: torch.Tensor, rows: torch.Tensor, token_rows: torch.Tensor | None, row_slots: torch.Tensor, step: torch.Tensor
) -> None:
    count = len(rows) if token_rows is None else len(token_rows)
    _slots_kernel[(triton.cdiv(count, TOKENS),)](
        rows, rows if token_rows is None else token_rows, row_slots, out, step, count,
        DECODE_ONLY=token_rows is None, BLOCK=TOKENS, num_warps=4,
    )  # fmt: skip


def group_tokens(slots: torch.Tensor, num_slots: int) -> GroupedTokens:
    """`slots`: of all tokens."""
    count, device = len(slots), slots.device
    tiling = next(tiling for tiling in TILINGS if count <= tiling.most)
    tiles = min(count, triton.cdiv(count, tiling.rows) + num_slots)
    cursors = torch.empty(triton.next_power_of_2(num_slots + 1), dtype=torch.int32, device=device)
    order = torch.empty(tiles * tiling.rows, dtype=torch.int32, device=device)
    tile_slots = torch.empty(tiles, dtype=torch.int32, device=device)
    _group_kernel[(1,)](
        slots, cursors, order, tile_slots, count, tiles,
        SLOTS=len(cursors), ROWS=tiling.rows, TOKENS=TOKENS, TILES=TILES, num_warps=8,
    )  # fmt: skip
    return GroupedTokens(order, tile_slots, count, tiling)


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    grouped: GroupedTokens,
    ranks: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bounds: tuple[int, int],
) -> None:
    assert out.is_contiguous()
    inner, tiling = _shrink(x, grouped, ranks, a), grouped.tiling
    (splits, positions, width), (_, num_outputs, rank) = inner.shape, b.shape
    second, third = bounds
    ends = (second, third - second, num_outputs - third)
    each = _outputs_of_a_program(sum(triton.cdiv(size, OUTPUTS) for size in ends), len(grouped.tile_slots))
    at_once = min(RANKS, max(16, triton.next_power_of_2(rank)))
    _expand_kernel[(sum(triton.cdiv(size, each) for size in ends), len(grouped.tile_slots))](
        inner, grouped.order, grouped.tile_slots, ranks, b, out, positions, width, num_outputs, rank, *bounds, each,
        SPLITS=splits, ROWS=tiling.rows, OUTPUTS=OUTPUTS, ALIGNED=math.gcd(OUTPUTS, *ends), RANKS=at_once,
        ONE_STEP=rank <= at_once, STAGES=3, num_warps=4 if tiling.rows < 64 or rank <= 16 else 8, **early_launch(x),
    )  # fmt: skip


def gated_low_rank(
    gate_up: torch.Tensor,
    x: torch.Tensor,
    grouped: GroupedTokens,
    ranks: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """silu(gate) * up, [tokens, columns], with the terms of both."""
    assert gate_up.is_contiguous() and b.shape[2] <= RANKS
    inner, tiling = _shrink(x, grouped, ranks, a), grouped.tiling
    (splits, positions, _), (_, num_outputs, rank) = inner.shape, b.shape
    columns = num_outputs // 2
    out = torch.empty(len(x), columns, dtype=gate_up.dtype, device=x.device)
    each = _outputs_of_a_program(triton.cdiv(columns, OUTPUTS), len(grouped.tile_slots))
    _expand_gated_kernel[(triton.cdiv(columns, each), len(grouped.tile_slots))](
        inner, grouped.order, grouped.tile_slots, ranks, b, gate_up, out, positions, columns, rank, each,
        SPLITS=splits, ROWS=tiling.rows, COLUMNS=OUTPUTS, ALIGNED=math.gcd(OUTPUTS, columns),
        RANKS=max(16, triton.next_power_of_2(rank)), STAGES=2, num_warps=4 if tiling.rows < 64 else 8,
        **early_launch(x),
    )  # fmt: skip
    return out


def _shrink(x: torch.Tensor, grouped: GroupedTokens, ranks: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[splits, positions, width] float32: what a tile without an adapter has is never read."""
    tiling, tiles = grouped.tiling, len(grouped.tile_slots)
    assert len(x) == grouped.num_tokens and x.stride(1) == 1
    _, width, num_inputs = a.shape
    step = tiling.inputs if x.element_size() == 2 else tiling.inputs // 4
    per_split = triton.cdiv(triton.cdiv(num_inputs, tiling.splits), step) * step
    splits, positions = triton.cdiv(num_inputs, per_split), tiles * tiling.rows
    inner = torch.empty(splits, positions, width, dtype=torch.float32, device=x.device)
    block = min(64, max(16, triton.next_power_of_2(width)))
    _shrink_kernel[(tiles, splits, triton.cdiv(width, block))](
        x, grouped.order, grouped.tile_slots, ranks, a, inner, x.stride(0), positions, width, num_inputs, per_split,
        ROWS=tiling.rows, WIDTH=block, INPUTS=step, EVEN=num_inputs % step == 0, STAGES=tiling.stages,
        num_warps=4, num_stages=tiling.stages, **early_launch(x),
    )  # fmt: skip
    return inner


def _outputs_of_a_program(blocks: int, tiles: int) -> int:
    """More than a block hides the loads of the next one, if enough programs are left."""
    return OUTPUTS * max(1, min(8, tiles * blocks // PROGRAMS))


def row_splits(num_inputs: int) -> tuple[int, int]:
    """How many splits of so many inputs a single row has."""
    inputs = max(ROW_INPUTS, triton.next_power_of_2(triton.cdiv(num_inputs, ROW_SPLITS)))
    return triton.cdiv(num_inputs, inputs), inputs
