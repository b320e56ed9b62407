"""Drafts that were chosen go behind the tokens of their rows."""

from typing import Protocol

import torch

from quire.kernels.dispatch import use_triton


class DraftedRows(Protocol):
    """Rows as a proposal sees them (spec_decode/draft_runner.py)."""

    token_ids: torch.Tensor  # [rows, most tokens] int32, rows at any distance
    num_tokens: torch.Tensor  # [rows] int64: known ones and drafts
    num_computed: torch.Tensor  # [rows] int64: those that the proposer's layers have computed


def append_drafts_torch(tokens: torch.Tensor, rows: torch.Tensor, state: DraftedRows) -> None:
    used = rows >= 0
    row = rows[used].long()
    known = state.num_tokens[row]
    done = state.num_computed[row] == known
    state.token_ids[row[done], known[done]] = tokens[used][done].int()
    state.num_tokens[row] = known + done


def append_drafts(
    tokens: torch.Tensor,  # [n]
    rows: torch.Tensor,  # [n], -1 for padding
    state: DraftedRows,
) -> None:
    """Rows whose tokens are all computed get theirs; others, with more of a prompt to come, and padding get none."""
    if use_triton(tokens):
        from quire.kernels.triton import append_drafts as kernel

        kernel.append_drafts(tokens, rows, state)
    else:
        append_drafts_torch(tokens, rows, state)
