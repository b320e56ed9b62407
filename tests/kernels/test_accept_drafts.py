"""Verification of drafts on a CPU, in C and by torch."""

import pytest
import torch

from quire.kernels.native import sampling
from tests.kernels import draft_cases


@pytest.mark.parametrize("seed", range(40))
def test_accepted_drafts(seed):
    draft_cases.check(seed, "cpu")


@pytest.mark.skipif(not sampling.serves_sampling(torch.device("cpu")), reason="no compiler")
def test_rows_that_do_not_exist_are_refused():
    tokens, first, rows, state = draft_cases.random_case(0, "cpu")
    rows[0] = len(state.num_tokens)
    out, counts = torch.zeros(len(rows), 4, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int32)
    by_row = (state.token_ids, state.num_tokens, state.num_computed, state.token_limit)
    with pytest.raises(ValueError):
        sampling.accept_drafts(tokens, first, rows, *by_row, out, counts)
