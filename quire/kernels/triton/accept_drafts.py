"""Verifying drafts, a program for each row."""

import torch
import triton
import triton.language as tl

from quire.kernels.accept_drafts import DraftRows


@triton.jit(do_not_specialize=["stride"])
def _accept_kernel(
    tokens,
    first,
    rows,
    token_ids,
    stride,
    num_tokens,
    num_computed,
    token_limit,
    out,
    num_sampled,
    WIDTH: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        begin = tl.load(first + i)
        count = tl.load(first + i + 1) - begin
        known = tl.load(num_tokens + row)
        done = tl.load(num_computed + row) == known + count - 1
        room = tl.where(done, tl.load(token_limit + row) - known, 0)
        kept = known * 0
        matches = True
        for j in tl.static_range(WIDTH):
            within = j < count
            drawn = tl.load(tokens + begin + j, mask=within, other=0).to(tl.int32)
            place = token_ids + row * stride + known + j
            held = tl.load(place, mask=within & done, other=-1)
            takes = within & matches & (j < room)
            tl.store(place, tl.maximum(drawn, 0), mask=takes)
            tl.store(out + i * WIDTH + j, drawn, mask=within)
            kept += tl.where(takes, 1, 0)
            matches = matches & within & (drawn == held)
        tl.store(num_tokens + row, known + kept)
        tl.store(num_computed + row, known + kept - 1, mask=done)
        tl.store(num_sampled + i, kept.to(tl.int32))


def accept_drafts(
    tokens: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    state: DraftRows,
    out: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    if not len(rows):
        return
    assert out.is_contiguous() and len(first) > len(rows)
    _accept_kernel[(len(rows),)](
        tokens, first, rows, state.token_ids, state.token_ids.stride(0), state.num_tokens, state.num_computed,
        state.token_limit, out, num_sampled, WIDTH=out.shape[1], num_warps=1,
    )  # fmt: skip
