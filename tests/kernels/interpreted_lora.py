"""Low-rank terms in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton.lora import Tiling
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


@pytest.mark.parametrize("count", [40, 100])
def test_many_tokens(monkeypatch, count):
    """Tilings as of thousands of tokens."""
    from quire.kernels.triton import lora

    few, some, many = (Tiling(most, 16, splits, 32, 1) for most, splits in ((16, 8), (64, 4), (1 << 30, 1)))
    monkeypatch.setattr(lora, "TILINGS", (few, some, many))
    lora_cases.check_many_tokens("cpu", torch.float32, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [72, 256])
def test_gated(width, dtype):
    lora_cases.check_gated("cpu", dtype, 30, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("slots", [[1], [0, 1], [-1, 0], [2, -1]])
@pytest.mark.parametrize("case", lora_cases.ROW_CASES)
def test_rows(case, slots, dtype):
    lora_cases.check_rows(case, slots, "cpu", dtype)


@pytest.mark.parametrize("slots", [[1], [0, -1]])
@pytest.mark.parametrize("quantized", lora_cases.GROUPS)
@pytest.mark.parametrize("case", ["query, key, value in one step", "gate and up in one step"])
def test_rows_of_quantized_weights(case, quantized, slots):
    lora_cases.check_rows(case, slots, "cpu", torch.float32, quantized)
