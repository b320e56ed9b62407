"""Verification of drafts, in Triton's interpreter: run by test_interpreter.py."""

import pytest

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.sample_tokens import Draw
from tests.kernels import draft_cases


@pytest.mark.parametrize("seed", range(12))
def test_accepted_drafts(seed):
    draft_cases.check(seed, "cpu")


@pytest.mark.parametrize("draw", [Draw.RANDOM, Draw.WARPED])
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(50, 50), (2500, 2500), (2500, 1100)])
def test_drafts_that_were_drawn(vocab, draft_vocab, draw):
    draft_cases.check_sampled(vocab, draft_vocab, draw, "cpu")
