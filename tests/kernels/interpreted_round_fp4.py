"""Rounding to 4-bit floats against the torch references, in Triton's interpreter: run by test_interpreter.py."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.round_fp4 import (
    round_mxfp4,
    round_mxfp4_torch,
    round_nvfp4,
    round_nvfp4_by_expert,
    round_nvfp4_by_expert_torch,
    round_nvfp4_torch,
)

torch.set_num_threads(1)  # tensors are tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 96, 1120])
def test_rounded(width, dtype):
    torch.manual_seed(0)
    x = (torch.randn(5, 2 * width) * torch.rand(5, 1) * 8).to(dtype)[:, :width]
    x[0] = 0
    x[1, :32] = torch.arange(32) / 4 - 3  # on the middle between two numbers
    for times in (224.0, 3000.0, 0.01):
        assert torch.equal(round_nvfp4(x, times), round_nvfp4_torch(x, times))
    assert torch.equal(round_mxfp4(x), round_mxfp4_torch(x))
    assert round_mxfp4(x[:0]).shape == (0, width)
    scales, experts = torch.tensor([1.0, 224.0, 0.5]), torch.randint(3, (15,)).int()
    wanted = round_nvfp4_by_expert_torch(x, scales, experts, 3)
    assert torch.equal(round_nvfp4_by_expert(x, scales, experts, 3), wanted)
    assert torch.equal(wanted[7], round_nvfp4_torch(x[2:3], float(scales[experts[7]]))[0])
