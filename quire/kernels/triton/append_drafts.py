"""Appending drafts, a program for each row."""

import torch
import triton
import triton.language as tl

from quire.kernels.append_drafts import DraftedRows


@triton.jit(do_not_specialize=["stride", "width"])
def _append_kernel(drafts, rows, token_ids, stride, width, num_tokens, num_computed, to_target, HAS_MAP: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row >= 0:
        known = tl.load(num_tokens + row)
        if tl.load(num_computed + row) == known:
            draft = tl.maximum(tl.load(drafts + i).to(tl.int64), 0)
            if HAS_MAP:
                draft = tl.load(to_target + draft)
            tl.store(token_ids + row * stride + tl.minimum(known, width - 1), draft.to(tl.int32))
            tl.store(num_tokens + row, known + 1)


def append_drafts(drafts: torch.Tensor, rows: torch.Tensor, state: DraftedRows, to_target: torch.Tensor | None) -> None:
    if not len(rows):
        return
    width = state.token_ids.shape[1]
    _append_kernel[(len(rows),)](
        drafts, rows, state.token_ids, state.token_ids.stride(0), width, state.num_tokens, state.num_computed,
        drafts if to_target is None else to_target, HAS_MAP=to_target is not None, num_warps=1,
    )  # fmt: skip
