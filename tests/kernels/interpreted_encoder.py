"""Attention without a cache in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.prepare_inputs import prepare_inputs, prepare_inputs_torch
from tests.kernels import encoder_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter does not multiply bfloat16
@pytest.mark.parametrize("lengths", ["one", "short", "empty"])
@pytest.mark.parametrize("case", encoder_cases.CASES)
def test_attention(case, lengths, dtype):
    encoder_cases.check(case, lengths, "cpu", dtype, padding=3)


def test_inputs_of_a_step_without_a_cache():
    rows, start = torch.tensor([2, 0]), torch.tensor([0, 3, 5], dtype=torch.int32)
    of_token = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    token_ids = torch.arange(32, dtype=torch.int32).view(4, 8)
    found, expected = (
        prepare(rows, start, of_token, token_ids, torch.zeros(4, dtype=torch.int64), [], [])
        for prepare in (prepare_inputs, prepare_inputs_torch)
    )
    assert found.input_ids.tolist() == expected.input_ids.tolist() == [16, 17, 18, 0, 1]
    assert found.positions.tolist() == expected.positions.tolist()
    assert found.seq_lens.tolist() == [3, 2] and found.slot_mapping == expected.slot_mapping == []
