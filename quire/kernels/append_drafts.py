"""Appending a proposer's next draft to rows, in ids of the target's vocabulary."""

from typing import Protocol

import numpy as np
import torch

from quire.kernels.dispatch import use_triton


class DraftedRows(Protocol):
    """The rows as a proposal sees them: drafts count as tokens."""

    token_ids: torch.Tensor  # [rows, ...] int32
    num_tokens: torch.Tensor  # [rows] int64: advanced
    num_computed: torch.Tensor  # [rows] int64: by the proposer's layers


def append_drafts_cpu(
    drafts: torch.Tensor, rows: torch.Tensor, state: DraftedRows, to_target: torch.Tensor | None
) -> None:
    # By numpy, on a CPU: of a few rows each operation of torch takes longer than all of these.
    tokens, known, computed = state.token_ids.numpy(), state.num_tokens.numpy(), state.num_computed.numpy()
    row, found = rows.numpy(), drafts.numpy()
    done = (row >= 0) & (computed[row] == known[row])
    row, found = row[done], np.maximum(found[done], 0)
    at = np.minimum(known[row], tokens.shape[1] - 1)
    tokens[row, at] = found if to_target is None else to_target.numpy()[found]
    known[row] += 1


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
        append_drafts_cpu(drafts, rows, state, to_target)
