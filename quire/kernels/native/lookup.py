"""Drafts that are found in earlier text, on a CPU."""

import torch

from quire.kernels.accept_drafts import DraftRows
from quire.kernels.native import native_function


def ngram_drafts(rows: torch.Tensor, state: DraftRows, shortest: int, longest: int, num_drafts: int) -> None:
    rows = rows.int()
    native_function("quire_ngram_drafts")(
        state.token_ids.data_ptr(), state.num_tokens.data_ptr(), state.num_computed.data_ptr(),
        state.token_limit.data_ptr(), state.num_found.data_ptr(), rows.data_ptr(),
        len(rows), state.token_ids.stride(0), shortest, longest, num_drafts,
    )  # fmt: skip
