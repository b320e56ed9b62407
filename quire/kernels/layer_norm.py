"""LayerNorm, optionally of the sum with a residual: the torch reference, and the choice of a kernel."""

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.dispatch import use_triton

LayerNormParams = tuple[torch.Tensor, torch.Tensor | None, float]  # weight and bias [D] float32, eps


def layer_norm_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., D], weight and bias [D] float32 -> [..., D], computed in float32 whatever the dtype of x."""
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    if use_triton(x):
        from quire.kernels.triton import layer_norm as kernel

        return kernel.layer_norm(x, None, weight, bias, eps)
    if native.serves(x):
        return native.layer_norm(x, None, weight, bias, eps)
    return layer_norm_torch(x, weight, bias, eps)


def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [N, D] -> (norm of their sum, their sum). The sum may overwrite `residual`."""
    if use_triton(x):
        from quire.kernels.triton import layer_norm as kernel

        return kernel.layer_norm(x, residual, weight, bias, eps), residual
    if native.serves(x) and residual.is_contiguous():
        return native.layer_norm(x, residual, weight, bias, eps), residual
    total = x + residual
    return layer_norm_torch(total, weight, bias, eps), total
