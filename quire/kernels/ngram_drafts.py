"""Prompt lookup: a row's drafts are the tokens behind an earlier occurrence of its last ones."""

import torch

from quire.kernels.accept_drafts import DraftRows
from quire.kernels.dispatch import use_triton
from quire.kernels.native.build import library
from quire.kernels.workspace import Workspace


def ngram_drafts_torch(rows: torch.Tensor, state: DraftRows, shortest: int, longest: int, num_drafts: int) -> None:
    for row in rows[rows >= 0].tolist():
        known, ids = int(state.num_tokens[row]), state.token_ids[row]
        room = min(num_drafts, int(state.token_limit[row]) - known - 1)
        state.num_found[row] = 0
        ids[known : known + num_drafts] = 0
        if known <= shortest or room < 1 or int(state.num_computed[row]) != known - 1:
            continue
        text = ids[:known]
        matches = torch.ones(known - 1, dtype=torch.bool, device=ids.device)  # by the n-gram's last position
        length = torch.zeros(known - 1, dtype=torch.int64, device=ids.device)
        for n in range(min(longest, known - 1)):
            matches[:n] = False
            matches[n:] &= text[: known - 1 - n] == text[known - 1 - n]
            length += matches
        best = int(length.max())
        if best < shortest:
            continue
        at = int((length == best).nonzero()[0]) + 1
        count = min(room, known - at)
        ids[known : known + count] = ids[at : at + count].clone()
        state.num_found[row] = count


def ngram_drafts(
    rows: torch.Tensor,  # [n] int32, -1 for padding
    state: DraftRows,
    shortest: int,
    longest: int,
    num_drafts: int,
    workspace: Workspace | None = None,  # on a GPU: of new_workspace(), for as many rows as the state has
) -> None:
    """Writes up to `num_drafts` drafts behind the known tokens of each row, and their number to num_found: those behind
    the longest n-gram (of `shortest` to `longest` tokens) before its end that equals its last tokens, and the earliest
    of several; within the row's limit. Rows with more to compute than their last token find none. Zeros
    follow those found: a request must not verify what another left in its row."""
    if use_triton(state.token_ids):
        from quire.kernels.triton import ngram_drafts as kernel

        assert isinstance(workspace, kernel.NgramWorkspace)
        kernel.ngram_drafts(rows, state, shortest, longest, num_drafts, workspace)
    elif state.token_ids.device.type == "cpu" and library() is not None:
        from quire.kernels.native import lookup

        lookup.ngram_drafts(rows, state, shortest, longest, num_drafts)
    else:
        ngram_drafts_torch(rows, state, shortest, longest, num_drafts)


def new_workspace(device: torch.device, num_rows: int) -> Workspace | None:
    """What a GPU's kernel keeps between launches."""
    if device.type != "cuda":
        return None
    from quire.kernels.triton.ngram_drafts import NgramWorkspace

    return NgramWorkspace(device, num_rows)
