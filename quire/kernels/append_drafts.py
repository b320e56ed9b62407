"""Appending a proposer's next draft to rows, in ids of the target's vocabulary."""

from typing import Protocol

import torch

from quire.kernels.dispatch import use_triton


class DraftedRows(Protocol):
    """The rows as a proposal sees them: drafts count as tokens."""

    token_ids: torch.Tensor  # [rows, ...] int32
    num_tokens: torch.Tensor  # [rows] int64: advanced
    num_computed: torch.Tensor  # [rows] int64: by the proposer's layers


def append_drafts_torch(
    drafts: torch.Tensor, rows: torch.Tensor, state: DraftedRows, to_target: torch.Tensor | None
) -> None:
    used = rows >= 0
    rows = rows[used].long()
    drafts = drafts[used].clamp(min=0)
    drafts = drafts if to_target is None else to_target[drafts.long()]
    known = state.num_tokens[rows]
    done = state.num_computed[rows] == known
    at = known.clamp(max=state.token_ids.shape[1] - 1)
    state.token_ids[rows, at] = torch.where(done, drafts.int(), state.token_ids[rows, at])
    state.num_tokens[rows] = known + done


def append_drafts(
    drafts: torch.Tensor,  # [n]: ids of the draft vocabulary; NO_TOKEN becomes 0
    rows: torch.Tensor,  # [n], -1 for padding
    state: DraftedRows,
    to_target: torch.Tensor | None = None,  # [draft vocab] int64; None: the vocabularies are one
) -> None:
    """Rows whose tokens are all computed get theirs; others, with more of a prompt to come, and padding get none."""
    if use_triton(drafts):
        from quire.kernels.triton import append_drafts as kernel

        kernel.append_drafts(drafts, rows, state, to_target)
    else:
        append_drafts_torch(drafts, rows, state, to_target)
