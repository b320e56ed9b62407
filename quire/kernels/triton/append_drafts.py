"""Drafts go behind the tokens of their rows, a program for each row."""

import torch
import triton
import triton.language as tl

from quire.kernels.append_drafts import DraftedRows


@triton.jit(do_not_specialize=["stride"])
def _append_kernel(tokens, rows, token_ids, stride, num_tokens, num_computed):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        known = tl.load(num_tokens + row)
        if tl.load(num_computed + row) == known:
            tl.store(token_ids + row * stride + known, tl.load(tokens + i).to(tl.int32))
            tl.store(num_tokens + row, known + 1)


def append_drafts(tokens: torch.Tensor, rows: torch.Tensor, state: DraftedRows) -> None:
    if len(rows):
        stride = state.token_ids.stride(0)
        _append_kernel[(len(rows),)](
            tokens, rows, state.token_ids, stride, state.num_tokens, state.num_computed, num_warps=1
        )
