"""Rows to fp8 (e4m3) or int8 with float32 scales: x ~ q * scale. Alone, or fused with the operation that computes x.

A scale is of a row, or of a group of a row's inputs (a power of two that divides them); then scales are [M, K / group],
those of one group next to each other, as products read them.
"""

import torch

from quire.kernels.dispatch import use_triton
from quire.kernels.rms_norm import fused_add_rms_norm_torch, rms_norm_torch
from quire.kernels.silu_mul import silu_mul_torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LARGEST = {FP8: FP8_MAX, torch.int8: 127.0}
SMALLEST_MAX = 1e-10  # a row of zeros must not divide by zero

Quantized = tuple[torch.Tensor, torch.Tensor]  # [M, K] fp8 or int8; [M] or [M, K / group] float32


def quantize_torch(
    x: torch.Tensor, scale: torch.Tensor | None = None, group: int = 0, dtype: torch.dtype = FP8
) -> Quantized:
    """x [M, K]; `scale` [1]: a fixed one for all rows instead of each row's own."""
    values, top = x.float(), LARGEST[dtype]
    if group:
        values = values.unflatten(1, (-1, group)).flatten(0, 1)
    if scale is None:
        row_max = values.abs().amax(-1).clamp(min=SMALLEST_MAX)
        # Not top / row_max, which torch rounds twice.
        scales, inverse = row_max * (1.0 / top), torch.full_like(row_max, top) / row_max
    else:
        scales = scale.float().expand(x.shape[0]).contiguous()
        inverse = 1.0 / scales
    scaled = (values * inverse[:, None]).clamp(-top, top)
    q = (scaled.round() if dtype is torch.int8 else scaled).to(dtype).view(x.shape)
    return q, scales.view(len(x), -1).t().contiguous().t() if group else scales


def quantize_fp8_torch(x: torch.Tensor, scale: torch.Tensor | None = None, group: int = 0) -> Quantized:
    return quantize_torch(x, scale, group)


def rms_norm_quant_torch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [M, K] -> (the norm of their sum, quantized; its scales; the sum)."""
    if residual is None:
        normed, total = rms_norm_torch(x, weight, eps), x
    else:
        normed, total = fused_add_rms_norm_torch(x, residual, weight, eps)
    return *quantize_torch(normed, scale, group), total


def silu_mul_quant_torch(gate_up: torch.Tensor, scale: torch.Tensor | None = None, group: int = 0) -> Quantized:
    """[M, 2 * K], gate before up -> silu(gate) * up [M, K], quantized."""
    return quantize_torch(silu_mul_torch(gate_up), scale, group)


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor | None = None, group: int = 0) -> Quantized:
    return _quantize(x, scale, group, FP8)


def quantize_int8(x: torch.Tensor, scale: torch.Tensor | None = None) -> Quantized:
    return _quantize(x, scale, 0, torch.int8)


def _quantize(x: torch.Tensor, scale: torch.Tensor | None, group: int, dtype: torch.dtype) -> Quantized:
    if use_triton(x):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.quantize(x, scale, group, dtype)
    return quantize_torch(x, scale, group, dtype)


def rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The caller must not use `residual` afterwards: the sum may overwrite it."""
    if use_triton(x):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.rms_norm_quant(x, residual, weight, eps, scale, group)
    return rms_norm_quant_torch(x, residual, weight, eps, scale, group)


def silu_mul_quant(gate_up: torch.Tensor, scale: torch.Tensor | None = None, group: int = 0) -> Quantized:
    if use_triton(gate_up):
        from quire.kernels.triton import quantize_fp8 as kernel

        return kernel.silu_mul_quant(gate_up, scale, group)
    return silu_mul_quant_torch(gate_up, scale, group)
