"""x [M, K] times a weight [N, K]: of a row the same bits for any M, for `--batch-invariant`."""

import torch
import torch.nn.functional as F

from quire.kernels.dispatch import early_launch, use_triton


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear. In torch, on a CPU, rows are multiplied one by one."""
    if not use_triton(x):
        rows = [F.linear(row, weight, bias) for row in x.split(1)]
        return torch.cat(rows) if rows else x.new_empty(0, len(weight))
    from quire.kernels.triton import invariant_linear as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.is_contiguous() else weight.contiguous()
    return kernel.invariant_linear(x, weight, bias, early_launch(x)["PDL"])
