"""Verification of drafts, in Triton's interpreter: run by test_interpreter.py."""

import pytest

import tests.kernels.interpreter_fix  # noqa: F401
from tests.kernels import draft_cases


@pytest.mark.parametrize("seed", range(12))
def test_accepted_drafts(seed):
    draft_cases.check(seed, "cpu")
