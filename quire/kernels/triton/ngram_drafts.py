"""Prompt lookup, a row's tokens split among programs: the one that is done last copies the drafts."""

import torch
import triton
import triton.language as tl

from quire.kernels.accept_drafts import DraftRows
from quire.kernels.workspace import Workspace

TILE = 2048  # tokens that a program compares at once
TILES = 4  # of a program, before a row is split among more of them
MAX_SPLITS = 32


class NgramWorkspace(Workspace):
    """By row: how many programs are done, and the best n-gram of those as a key that is greater for a longer one, then
    for an earlier one. Both are zero between launches."""

    def __init__(self, device: torch.device, num_rows: int) -> None:
        super().__init__(device)
        self.arrived = self.new_counters(num_rows)
        self.best = self.new_counters(2 * num_rows).view(torch.int64)


@triton.jit(do_not_specialize=["stride", "longest"])
def _ngram_kernel(
    rows,
    token_ids,
    stride,
    num_tokens,
    num_computed,
    token_limit,
    num_found,
    arrived,
    best,
    longest,
    SHORTEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,  # DRAFTS rounded up
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    split = tl.program_id(1)
    known = tl.load(num_tokens + row).to(tl.int32)
    room = tl.minimum(tl.load(token_limit + row).to(tl.int32) - known - 1, DRAFTS)
    computed = tl.load(num_computed + row).to(tl.int32)
    ids = token_ids + row * stride
    key = tl.full((), 0, tl.int64)
    if (known > SHORTEST) & (room > 0) & (computed == known - 1):
        last = tl.load(ids + known - 1)
        first = tl.load(ids + known - SHORTEST)
        # A program takes every SPLITS-th tile, so that all have as much to do whatever the row's length.
        for start in range(split * TILE, known - 1, SPLITS * TILE):
            end = start + tl.arange(0, TILE)
            fits = (end < known - 1) & (end >= SHORTEST - 1)
            equal = (tl.load(ids + end, mask=fits, other=-1) == last) & fits
            if SHORTEST > 1:
                equal &= tl.load(ids + end - (SHORTEST - 1), mask=equal, other=-1) == first
            if tl.max(equal.to(tl.int32), axis=0) > 0:
                length = tl.zeros((TILE,), tl.int32)
                for n in range(longest):
                    inside = equal & (end >= n)
                    wanted = tl.load(ids + known - 1 - n, mask=n < known, other=-1)
                    equal = inside & (tl.load(ids + end - n, mask=inside, other=-2) == wanted)
                    length += equal.to(tl.int32)
                length = tl.where(length >= SHORTEST, length, 0)
                keys = (length.to(tl.int64) << 32) | (0x7FFFFFFF - end).to(tl.int64)
                key = tl.maximum(key, tl.max(tl.where(length > 0, keys, 0), axis=0))
    if SPLITS > 1:
        # After its own part each counts itself, so that the last one sees the greatest key of all.
        tl.atomic_max(best + row, key, sem="acq_rel")
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") != SPLITS - 1:
            return
        key = tl.atomic_xchg(best + row, tl.full((), 0, tl.int64), sem="acq_rel")
        tl.store(arrived + row, 0)
    at = (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32) + 1
    count = tl.where(key > 0, tl.minimum(room, known - at), 0)
    j = tl.arange(0, WIDTH)
    drafts = tl.load(ids + at + j, mask=j < count, other=0)
    tl.store(ids + known + j, drafts, mask=j < DRAFTS)
    tl.store(num_found + row, count)


def ngram_drafts(
    rows: torch.Tensor,
    state: DraftRows,
    shortest: int,
    longest: int,
    num_drafts: int,
    workspace: NgramWorkspace,
    tile: int = TILE,
) -> None:
    if not len(rows):
        return
    width = state.token_ids.shape[1]
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(width, TILES * tile)))
    _ngram_kernel[(len(rows), splits)](
        rows, state.token_ids, state.token_ids.stride(0), state.num_tokens, state.num_computed, state.token_limit,
        state.num_found, workspace.arrived, workspace.best, longest, SHORTEST=shortest, DRAFTS=num_drafts,
        WIDTH=triton.next_power_of_2(num_drafts), TILE=tile, SPLITS=splits, num_warps=8,
    )  # fmt: skip
