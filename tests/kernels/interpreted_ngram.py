"""Prompt lookup, in Triton's interpreter: run by test_interpreter.py."""

import functools

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton.ngram_drafts import NgramWorkspace, ngram_drafts
from tests.kernels import ngram_cases


@pytest.mark.parametrize("tile", [16, 64, 256], ids=lambda tile: f"{tile} tokens at once")
@pytest.mark.parametrize("seed", range(3))
def test_drafts_found(seed, tile):
    workspace = NgramWorkspace(torch.device("cpu"), 12)
    ngram_cases.check(seed, "cpu", functools.partial(ngram_drafts, workspace=workspace, tile=tile))
    assert not workspace.arrived.any() and not workspace.best.any()
