"""RMSNorm, optionally of the sum with a residual: the torch reference, and the choice of a kernel."""

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.dispatch import use_triton

RMSNormParams = tuple[torch.Tensor, float]  # weight [D], epsilon: for kernels that fuse the norm


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] float32 -> [..., D], computed in float32 whatever the dtype of x."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def fused_add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [N, D] -> (norm of their sum, their sum)."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if use_triton(x):
        from quire.kernels.triton import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    if native.serves(x):
        return native.rms_norm(x, None, weight, eps)
    return rms_norm_torch(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller must not use `residual` afterwards: the sum may overwrite it."""
    if use_triton(x):
        from quire.kernels.triton import rms_norm as kernel

        return kernel.fused_add_rms_norm(x, residual, weight, eps)
    if native.serves(x) and residual.is_contiguous():
        return native.rms_norm(x, residual, weight, eps), residual
    return fused_add_rms_norm_torch(x, residual, weight, eps)
