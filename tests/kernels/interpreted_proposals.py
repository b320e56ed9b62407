"""Passes of a proposer, in Triton's interpreter: run by test_interpreter.py."""

import tests.kernels.interpreter_fix  # noqa: F401
from tests.spec_decode.test_draft_runner import *  # noqa: F403
