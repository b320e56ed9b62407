"""x [M, K] times a weight [N, K]: of a row the same bits for any M, for `--batch-invariant`."""

import torch

from quire.kernels.dispatch import early_launch, use_triton
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_linear import skinny_linear_torch


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RMSNormParams | None = None,  # RMSNorm of x first
    residual: torch.Tensor | None = None,  # added to the result; contiguous
    silu: bool = False,  # the weight is [gate; up]: silu(gate) * up, [M, N / 2]
) -> torch.Tensor:
    """In torch, on a CPU, rows are multiplied one by one."""
    if not use_triton(x):
        one = [
            skinny_linear_torch(
                x[i : i + 1], weight, bias, norm=norm, residual=None if residual is None else residual[i : i + 1],
                silu=silu,
            )
            for i in range(len(x))
        ]  # fmt: skip
        return torch.cat(one) if one else x.new_empty(0, len(weight) // (2 if silu else 1))
    from quire.kernels.triton import invariant_linear as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.is_contiguous() else weight.contiguous()
    return kernel.invariant_linear(x, weight, bias, norm, residual, silu, early_launch(x)["PDL"])


def can_fuse(weight: torch.Tensor) -> bool:
    """A row times its norm's weight is rounded before it is divided by its size: too large for float16."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float32)
