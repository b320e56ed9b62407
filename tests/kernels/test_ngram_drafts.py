"""Prompt lookup in C and torch, and what the compiler makes of the GPU's kernel."""

import pytest
import torch

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.ngram_drafts import ngram_drafts
from tests.kernels import ngram_cases


@pytest.mark.parametrize("seed", range(20))
def test_drafts_found(seed):
    ngram_cases.check(seed, "cpu", ngram_drafts)


def test_a_long_row_and_many():
    """More tokens than one thread takes; the n-gram is the very first."""
    ids = torch.arange(40_000, dtype=torch.int32).repeat(6, 1)
    known = torch.full((6,), 39_000)
    ids[:, 38_996:39_000] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    state = ngram_cases.Rows(ids, known, known - 1, known + 100, torch.zeros(6, dtype=torch.int32))
    ngram_drafts(torch.arange(6, dtype=torch.int32), state, 2, 4, 5)
    assert state.num_found.tolist() == [5] * 6
    assert ids[:, 39_000:39_005].tolist() == [[4, 5, 6, 7, 8]] * 6


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("splits", [1, 16])
def test_the_kernel_compiles_for_a_gpu(splits):
    pytest.importorskip("triton")
    from quire.kernels.triton.ngram_drafts import _ngram_kernel
    from tests.kernels.test_compile import compiled

    counts = dict.fromkeys(("num_tokens", "num_computed", "token_limit", "best"), "*i64")
    ids = dict.fromkeys(("rows", "token_ids", "num_found", "arrived"), "*i32")
    types = counts | ids | {"stride": "i32", "longest": "i32"}
    constants = {"SHORTEST": 3, "DRAFTS": 4, "WIDTH": 4, "TILE": 2048, "SPLITS": splits}
    compiled(_ngram_kernel, types, constants, warps=8)
