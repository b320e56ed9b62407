"""The low-rank terms of adapters: every row's inner product by A, then the sum with its product by B."""

import torch
import triton
import triton.language as tl

TOKENS = 128
ROWS = 16  # of a tile: the least that tl.dot takes
INPUTS = 128
OUTPUTS = 64
RANKS = 32  # at once: registers hold a tile of them for every split
NO_SLOT = tl.constexpr(2**31 - 1)
MAX_SPLITS = 8  # of the inputs, so that few rows occupy more than a few multiprocessors


@triton.jit(do_not_specialize=["num_tokens"])
def _slots_kernel(rows, token_rows, row_slots, out, num_tokens, DECODE_ONLY: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    place = token
    if not DECODE_ONLY:
        place = tl.load(token_rows + token, mask=inside, other=-1)
    row = tl.load(rows + place, mask=inside & (place >= 0), other=-1)
    tl.store(out + token, tl.load(row_slots + row, mask=row >= 0, other=-1), mask=inside)


@triton.jit
def _slot_of(slots, ranks, row, num_tokens):
    """-1 for rows without an adapter, and where a row's leaves this layer as it is."""
    slot = tl.load(slots + row, mask=row < num_tokens, other=-1)
    return tl.where(tl.load(ranks + slot, mask=slot >= 0, other=0) > 0, slot, -1)


@triton.jit
def _next_slot(slot, s):
    """The lowest above s that a row of the tile has; NO_SLOT behind the last."""
    return tl.min(tl.where(slot > s, slot, NO_SLOT), axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x,
    x_stride,
    slots,
    ranks,
    a,
    inner,  # [splits, tokens, width]
    num_tokens,
    width,  # parts * rank
    num_inputs,
    per_split,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * per_split
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    slot = _slot_of(slots, ranks, row, num_tokens)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    s = _next_slot(slot, -1)
    while s < NO_SLOT:
        mine = slot == s
        found = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(first, first + per_split, INPUTS):
            k = begin + tl.arange(0, INPUTS)
            of_x = mine[:, None] & (k < num_inputs)[None, :]
            of_a = (column < width)[:, None] & (k < num_inputs)[None, :]
            xs = tl.load(x + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=of_x, other=0.0)
            of_slot = (column.to(tl.int64) + s * width)[:, None] * num_inputs + k[None, :]
            weights = tl.load(a + of_slot, mask=of_a, other=0.0)
            found = tl.dot(xs, tl.trans(weights), found, input_precision="ieee")
        # Other rows keep theirs, not the sum with a product of zeros, which an infinite weight would make NaN.
        total = tl.where(mine[:, None], found, total)
        s = _next_slot(slot, s)
    at = (tl.program_id(1).to(tl.int64) * num_tokens + row)[:, None] * width + column[None, :]
    tl.store(inner + at, total, mask=(slot >= 0)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "second", "third"])
def _expand_kernel(
    inner,
    slots,
    ranks,
    b,
    out,
    num_tokens,
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
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * OUTPUTS
    column = begin + tl.arange(0, OUTPUTS)
    slot = _slot_of(slots, ranks, row, num_tokens)
    real = slot >= 0
    if tl.max(real.to(tl.int32), axis=0) == 0:
        return
    part_of = (column >= second).to(tl.int32) + (column >= third).to(tl.int32)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for part in tl.static_range(PARTS):
        here = (part_of == part) & (column < num_outputs)
        if tl.max(here.to(tl.int32), axis=0) > 0:
            s = _next_slot(slot, -1)
            while s < NO_SLOT:
                mine = slot == s
                term = tl.zeros([ROWS, OUTPUTS], tl.float32)
                for first in range(0, rank, RANKS):
                    r = first + tl.arange(0, RANKS)
                    product = tl.zeros([ROWS, RANKS], tl.float32)
                    for split in tl.static_range(SPLITS):
                        from_ = (row.to(tl.int64) + split * num_tokens)[:, None] * width + (part * rank + r)[None, :]
                        product += tl.load(inner + from_, mask=mine[:, None] & (r < rank)[None, :], other=0.0)
                    of_slot = (column.to(tl.int64) + s * num_outputs)[:, None] * rank + r[None, :]
                    weights = tl.load(b + of_slot, mask=here[:, None] & (r < rank)[None, :], other=0.0)
                    term = tl.dot(product.to(weights.dtype), tl.trans(weights), term, input_precision="ieee")
                total = tl.where(mine[:, None] & here[None, :], term, total)
                s = _next_slot(slot, s)
    at = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    mask = real[:, None] & (column < num_outputs)[None, :]
    before = tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, (before.to(tl.float32) + total).to(before.dtype), mask=mask)


def write_slots_of_tokens(
    out: torch.Tensor, rows: torch.Tensor, token_rows: torch.Tensor | None, row_slots: torch.Tensor
) -> None:
    count = len(rows) if token_rows is None else len(token_rows)
    _slots_kernel[(triton.cdiv(count, TOKENS),)](
        rows, rows if token_rows is None else token_rows, row_slots, out, count,
        DECODE_ONLY=token_rows is None, BLOCK=TOKENS, num_warps=4,
    )  # fmt: skip


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    ranks: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bounds: tuple[int, int],
) -> None:
    """The splits depend on the layer alone, so that a row's bits do not depend on the number of rows."""
    assert out.is_contiguous() and x.stride(1) == 1
    (_, width, num_inputs), (_, num_outputs, rank) = a.shape, b.shape
    tokens, parts = len(x), width // rank
    per_split = triton.cdiv(triton.cdiv(num_inputs, MAX_SPLITS), INPUTS) * INPUTS
    splits = triton.cdiv(num_inputs, per_split)
    inner = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    block = min(64, max(16, triton.next_power_of_2(width)))
    tiles = triton.cdiv(tokens, ROWS)
    _shrink_kernel[(tiles, splits, triton.cdiv(width, block))](
        x, x.stride(0), slots, ranks, a, inner, tokens, width, num_inputs, per_split,
        ROWS=ROWS, WIDTH=block, INPUTS=INPUTS, num_warps=4,
    )  # fmt: skip
    _expand_kernel[(tiles, triton.cdiv(num_outputs, OUTPUTS))](
        inner, slots, ranks, b, out, tokens, width, num_outputs, rank, *bounds,
        PARTS=parts, SPLITS=splits, ROWS=ROWS, OUTPUTS=OUTPUTS, RANKS=16 if rank <= 16 else RANKS, num_warps=4,
    )  # fmt: skip
