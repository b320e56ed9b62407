"""Verifying drafts: a row keeps the tokens drawn at its positions up to the first that differs from its draft.

Drafts lie in the row's token ids behind its known tokens, where the step that verifies them has read them. A token is
drawn from its request's seed and its position alone, so the tokens kept are those that steps of one token would give.
"""

from typing import Protocol

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.native import sampling
from quire.kernels.native.sampling import serves_sampling


class DraftRows(Protocol):
    """The part of the worker's row state that verification reads and advances."""

    token_ids: torch.Tensor  # [rows, max_model_len + drafts] int32
    num_tokens: torch.Tensor  # [rows] int64: known tokens, without drafts
    num_computed: torch.Tensor  # [rows] int64: after the step, drafts included
    token_limit: torch.Tensor  # [rows] int64: the most tokens a row may have
    num_found: torch.Tensor  # [rows] int32: drafts behind the known tokens, where a proposer may find none


def accept_drafts_torch(
    tokens: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    state: DraftRows,
    out: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    width = out.shape[1]
    used = rows >= 0
    row = rows[used].long()
    begin, count = first[:-1][used].long(), first.diff()[used].long()
    known = state.num_tokens[row]
    offset = torch.arange(width, device=rows.device)
    drawn = tokens[(begin.unsqueeze(1) + offset).clamp(max=max(0, len(tokens) - 1))].int()
    at = (known.unsqueeze(1) + offset).clamp(max=state.token_ids.shape[1] - 1)
    held = state.token_ids[row.unsqueeze(1), at]
    matches = (drawn == held) & (offset < count.unsqueeze(1) - 1)
    accepted = 1 + matches.int().cumprod(dim=1).sum(dim=1)
    # A row that has not computed all its tokens has nothing to sample from yet.
    done = state.num_computed[row] == known + count - 1
    kept = torch.minimum(accepted, state.token_limit[row] - known).clamp(min=0) * done
    mine = offset < kept.unsqueeze(1)
    state.token_ids[row.unsqueeze(1), at] = torch.where(mine, drawn.clamp(min=0), held)
    state.num_tokens[row] = known + kept
    state.num_computed[row] = torch.where(done, known + kept - 1, state.num_computed[row])
    out[used] = drawn
    num_sampled[used] = kept.int()


def accept_drafts(
    tokens: torch.Tensor,  # [m]: drawn, for every position of every row; NO_TOKEN where there was none to draw
    first: torch.Tensor,  # [n + 1] int32: where each row's positions begin
    rows: torch.Tensor,  # [n], -1 for padding
    state: DraftRows,
    out: torch.Tensor,  # [n, 1 + most drafts] int32: those drawn, of which the first num_sampled count
    num_sampled: torch.Tensor,  # [n] int32
) -> None:
    """Rows that have computed all their tokens get the drawn ones appended, as many as their drafts foresaw and one
    more, within their limit; what a step computed beyond that is computed again. Others get nothing, and padding is
    left alone."""
    if use_triton(out):
        from quire.kernels.triton import accept_drafts as kernel

        kernel.accept_drafts(tokens, first, rows, state, out, num_sampled)
    elif serves_sampling(out.device):
        by_row = (state.token_ids, state.num_tokens, state.num_computed, state.token_limit)
        sampling.accept_drafts(tokens, first, rows, *by_row, out, num_sampled)
    else:
        accept_drafts_torch(tokens, first, rows, state, out, num_sampled)
