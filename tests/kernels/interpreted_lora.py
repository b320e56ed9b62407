"""Low-rank terms in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from tests.kernels import lora_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter does not multiply bfloat16
@pytest.mark.parametrize("slots", lora_cases.SLOTS)
@pytest.mark.parametrize("layer", lora_cases.LAYERS)
def test_low_rank_terms(layer, slots, dtype):
    lora_cases.check(layer, slots, "cpu", dtype)


def test_an_infinite_weight_stays_with_its_rows():
    lora_cases.check_an_infinite_weight_stays_with_its_rows("cpu", torch.float32)


def test_rank_0_leaves_outputs_as_they_are():
    lora_cases.check_rank_0_leaves_outputs_as_they_are("cpu", torch.float32)


def test_slots_of_tokens():
    lora_cases.check_slots_of_tokens("cpu")
