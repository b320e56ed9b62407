"""The low-rank terms of adapters: every row's inner products by A, then the sum with their product by B.

Tokens are sorted by adapter once a step, each adapter's padded to whole tiles, so that a tile has one. As many programs
are launched as the worst distribution needs; those without a tile return at once, as do tiles of a slot whose adapter
leaves the layer as it is. One or two rows have kernels of their own, and their sum is part of the base's product
(`row_term`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch
from quire.kernels.rms_norm import RMSNormParams

TOKENS = 1024  # of a program at once
TILES = 64
OUTPUTS = 128
RANKS = 32  # at once: registers hold a tile of them for every split
ROW_SPLITS = 32  # of the inputs of a single row
ROW_RANKS = 16  # of a program for a single row


@dataclass(frozen=True)
class Tiling:
    """How so many tokens are divided. A row's bits depend on this and on its adapter, not on the other rows."""

    most: int  # tokens
    rows: int  # of a tile
    splits: int  # of the inputs, so that few tiles occupy more than a few multiprocessors
    inputs: int  # at once
    stages: int


TILINGS = (Tiling(256, 16, 8, 128, 3), Tiling(2048, 64, 4, 64, 4), Tiling(1 << 30, 64, 1, 64, 4))
TOKEN_COUNTS = tuple(tiling.most + 1 for tiling in TILINGS[:-1])  # at which kernels change


@dataclass(frozen=True)
class GroupedTokens:
    """Of one adapter in every tile."""

    order: torch.Tensor  # [tiles * rows] int32: the token at each position, -1 for none
    tile_slots: torch.Tensor  # [tiles] int32, -1 for none
    num_tokens: int
    tiling: Tiling


@triton.jit(do_not_specialize=["num_tokens"])
def _slots_kernel(rows, token_rows, row_slots, out, num_tokens, DECODE_ONLY: tl.constexpr, BLOCK: tl.constexpr):
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
    own = tl.where(s < SLOTS - 1, (counts + ROWS - 1) // ROWS, 0)
    end = tl.cumsum(own, 0)
    begin = end - own
    tl.store(cursors + s, begin * ROWS)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (begin[None, :] <= tile[:, None]) & (tile[:, None] < end[None, :])
        tl.store(tile_slots + tile, tl.sum(tl.where(inside, s[None, :] + 1, 0), 1) - 1, mask=tile < num_tiles)
    for first in range(0, num_tiles * ROWS, TOKENS):
        position = first + tl.arange(0, TOKENS)
        tl.store(order + position, tl.full([TOKENS], -1, tl.int32), mask=position < num_tiles * ROWS)
    tl.debug_barrier()
    one = tl.full([TOKENS], 1, tl.int32)
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        # In any order: it decides the row in a tile, but not one bit of the result.
        position = tl.atomic_add(cursors + slot, one, mask=slot >= 0, sem="relaxed")
        tl.store(order + position, token, mask=slot >= 0)


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


@triton.jit(do_not_specialize=["positions", "second", "third"])
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
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(1)
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    own_rank = tl.load(ranks + slot)
    if own_rank == 0:
        return
    position = tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(order + position)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = token.to(tl.int64)[:, None] * num_outputs + column[None, :]
    real = (token >= 0)[:, None] & (column < num_outputs)[None, :]
    before = tl.load(out + at, mask=real, other=0.0)
    part_of = (column >= second).to(tl.int32) + (column >= third).to(tl.int32)
    of_b = b + (slot.to(tl.int64) * num_outputs + tl.minimum(column, num_outputs - 1))[:, None] * rank
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for part in tl.static_range(PARTS):
        here = (part_of == part) & (column < num_outputs)
        if tl.max(here.to(tl.int32), axis=0) > 0:
            term = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for first in range(0, own_rank, RANKS):
                r = first + tl.arange(0, RANKS)
                inside = (r < rank)[None, :]
                product = tl.zeros([ROWS, RANKS], tl.float32)
                for split in tl.static_range(SPLITS):
                    from_ = (position.to(tl.int64) + split * positions)[:, None] * width + (part * rank + r)[None, :]
                    product += tl.load(inner + from_, mask=inside, other=0.0)
                weights = tl.load(of_b + r[None, :], mask=inside, other=0.0)
                term = tl.dot(product.to(weights.dtype), tl.trans(weights), term, input_precision="ieee")
            total = tl.where(here[None, :], term, total)
    tl.store(out + at, (before.to(tl.float32) + total).to(before.dtype), mask=real)


@triton.jit
def _shrink_row_kernel(
    x,  # [rows, inputs]
    norm_weight,  # [inputs] of an RMSNorm of x
    slots,
    ranks,
    a,  # [slots, width, inputs]
    inner,  # [rows, splits, width]
    x_stride,
    width,
    num_inputs,
    eps,
    INPUTS: tl.constexpr,  # of a split
    RANKS: tl.constexpr,
    ROW: tl.constexpr,  # all inputs, rounded up
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split, row = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if tl.load(ranks + slot) == 0:
        return
    column = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    k = split * INPUTS + tl.arange(0, INPUTS)
    of_a = (slot.to(tl.int64) * width + column)[:, None] * num_inputs + k[None, :]
    weights = tl.load(a + of_a, mask=(column < width)[:, None] & (k < num_inputs)[None, :], other=0.0)
    of_row = x + row.to(tl.int64) * x_stride
    values = tl.load(of_row + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        values *= tl.load(norm_weight + k, mask=k < num_inputs, other=0.0).to(tl.float32)
        every = tl.arange(0, ROW)
        whole = tl.load(of_row + every, mask=every < num_inputs, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / num_inputs + eps)
    found = tl.sum(weights.to(tl.float32) * values[None, :], 1) * scale
    tl.store(inner + (row * tl.num_programs(0) + split) * width + column, found, mask=column < width)


@triton.jit
def prefetch_row(n, slots, b, num_outputs, rank):
    """Into the second cache: what the first row's adapter has of B for columns `n`, or the start of it."""
    slot = tl.maximum(tl.load(slots), 0).to(tl.int64)
    of_b = b + (slot * num_outputs + tl.minimum(n, num_outputs - 1)) * rank
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [of_b.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def row_term(
    n,  # output columns
    row,
    inner,  # [rows, splits, width]
    slots,
    ranks,
    b,  # [slots, outputs, rank]
    num_outputs,
    splits,
    width,
    rank,
    second,
    third,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """B times the inner products of one row, for columns `n`."""
    total = tl.zeros(n.shape, tl.float32)
    slot = tl.load(slots + row)
    if slot >= 0:
        own_rank = tl.load(ranks + slot)
        part_of = (n >= second).to(tl.int32) + (n >= third).to(tl.int32)
        of_b = b + (slot.to(tl.int64) * num_outputs + tl.minimum(n, num_outputs - 1))[:, None] * rank
        split = tl.arange(0, SPLITS)
        for part in tl.static_range(PARTS):
            here = (part_of == part) & (n < num_outputs)
            if tl.max(here.to(tl.int32), axis=0) > 0:
                for first in range(0, own_rank, RANKS):
                    r = first + tl.arange(0, RANKS)
                    weights = tl.load(of_b + r[None, :], mask=(r < rank)[None, :], other=0.0).to(tl.float32)
                    from_ = (row * splits + split)[:, None] * width + (part * rank + r)[None, :]
                    inside = (split < splits)[:, None] & (r < rank)[None, :]
                    product = tl.sum(tl.load(inner + from_, mask=inside, other=0.0), 0)
                    total += tl.where(here, tl.sum(weights * product[None, :], 1), 0.0)
    return total


def write_slots_of_tokens(
    out: torch.Tensor, rows: torch.Tensor, token_rows: torch.Tensor | None, row_slots: torch.Tensor
) -> None:
    count = len(rows) if token_rows is None else len(token_rows)
    _slots_kernel[(triton.cdiv(count, TOKENS),)](
        rows, rows if token_rows is None else token_rows, row_slots, out, count,
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
    tiling, tiles = grouped.tiling, len(grouped.tile_slots)
    assert len(x) == grouped.num_tokens and out.is_contiguous() and x.stride(1) == 1
    (_, width, num_inputs), (_, num_outputs, rank) = a.shape, b.shape
    step = tiling.inputs if x.element_size() == 2 else tiling.inputs // 4
    per_split = triton.cdiv(triton.cdiv(num_inputs, tiling.splits), step) * step
    splits = triton.cdiv(num_inputs, per_split)
    positions = tiles * tiling.rows
    inner = torch.empty(splits, positions, width, dtype=torch.float32, device=x.device)
    block = min(64, max(16, triton.next_power_of_2(width)))
    launch = early_launch(x)
    _shrink_kernel[(tiles, splits, triton.cdiv(width, block))](
        x, grouped.order, grouped.tile_slots, ranks, a, inner, x.stride(0), positions, width, num_inputs, per_split,
        ROWS=tiling.rows, WIDTH=block, INPUTS=step, EVEN=num_inputs % step == 0, STAGES=tiling.stages,
        num_warps=4, num_stages=tiling.stages, **launch,
    )  # fmt: skip
    _expand_kernel[(triton.cdiv(num_outputs, OUTPUTS), tiles)](
        inner, grouped.order, grouped.tile_slots, ranks, b, out, positions, width, num_outputs, rank, *bounds,
        PARTS=width // rank, SPLITS=splits, ROWS=tiling.rows, OUTPUTS=OUTPUTS, RANKS=16 if rank <= 16 else RANKS,
        num_warps=4 if tiling.rows < 64 or rank <= 16 else 8, **launch,
    )  # fmt: skip


def shrink_rows(
    x: torch.Tensor, norm: RMSNormParams | None, slots: torch.Tensor, ranks: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    """[rows, splits, width]: what a row without an adapter, or whose adapter leaves the layer as it is, has is never
    read."""
    assert x.stride(1) == 1
    (rows, num_inputs), width = x.shape, a.shape[1]
    inputs = max(128, triton.next_power_of_2(triton.cdiv(num_inputs, ROW_SPLITS)))
    splits = triton.cdiv(num_inputs, inputs)
    inner = torch.empty(rows, splits, width, dtype=torch.float32, device=x.device)
    gain, eps = norm if norm is not None else (None, 0.0)
    _shrink_row_kernel[(splits, triton.cdiv(width, ROW_RANKS), rows)](
        x, gain, slots, ranks, a, inner, x.stride(0), width, num_inputs, eps,
        INPUTS=inputs, RANKS=ROW_RANKS, ROW=triton.next_power_of_2(num_inputs), HAS_NORM=norm is not None,
        num_warps=4, **early_launch(x),
    )  # fmt: skip
    return inner
