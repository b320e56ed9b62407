"""Attention without a cache in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from tests.kernels import encoder_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter does not multiply bfloat16
@pytest.mark.parametrize("lengths", ["one", "short", "empty"])
@pytest.mark.parametrize("case", encoder_cases.CASES)
def test_attention(case, lengths, dtype):
    encoder_cases.check(case, lengths, "cpu", dtype, padding=3)
