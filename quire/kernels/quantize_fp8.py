"""Rows to fp8 (e4m3) with a float32 scale each: x ~ q * scale. Alone, or fused with the operation that computes x."""

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.rms_norm import fused_add_rms_norm_torch, rms_norm_torch
from quire.kernels.silu_mul import silu_mul_torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_MAX = 1e-10  # a row of zeros must not divide by zero

Quantized = tuple[torch.Tensor, torch.Tensor]  # [M, K] fp8, [M] float32


def quantize_fp8_torch(x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    """x [M, K]; `scale` [1]: a fixed one for all rows instead of each row's own."""
    values = x.float()
    if scale is None:
        row_max = values.abs().amax(-1).clamp(min=SMALLEST_MAX)
        # Not FP8_MAX / row_max, which torch rounds twice.
        scales, inverse = row_max * (1.0 / FP8_MAX), torch.full_like(row_max, FP8_MAX) / row_max
    else:
        scales = scale.float().expand(x.shape[0]).contiguous()
        inverse = 1.0 / scales
    return (values * inverse[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def rms_norm_quant_torch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [M, K] -> (the norm of their sum, quantized; its scales; the sum)."""
    if residual is None:
        normed, total = rms_norm_torch(x, weight, eps), x
    else:
        normed, total = fused_add_rms_norm_torch(x, residual, weight, eps)
    return *quantize_fp8_torch(normed, scale), total


def silu_mul_quant_torch(gate_up: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    """[M, 2 * K], gate before up -> silu(gate) * up [M, K], quantized."""
    return quantize_fp8_torch(silu_mul_torch(gate_up), scale)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    if use_triton(x):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.quantize_fp8(x, scale)
    return quantize_fp8_torch(x, scale)


def rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The caller must not use `residual` afterwards: the sum may overwrite it."""
    if use_triton(x):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.rms_norm_quant(x, residual, weight, eps, scale)
    return rms_norm_quant_torch(x, residual, weight, eps, scale)


def silu_mul_quant(gate_up: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    if use_triton(gate_up):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.silu_mul_quant(gate_up, scale)
    return silu_mul_quant_torch(gate_up, scale)
