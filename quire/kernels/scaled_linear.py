"""x [M, K] times a weight [N, K], both in 8 bits, for many rows: fp8 with a scale per block, int8 with one per output.

Also fp8 weights with a scale per block or output as numbers of 16 bits, for activations that are not quantized.
"""

import functools

import torch
import torch.nn.functional as F

from quire.kernels.dispatch import use_triton
from quire.kernels.quantize_fp8 import FP8, quantize_fp8
from quire.kernels.scaled_table import ScaledConfig, choose
from quire.kernels.skinny_linear import Groups, expand_scales, skinny_linear_torch

LIBRARY_GROUPS = (128, 128)


def scaled_linear(
    q: torch.Tensor,  # [M, K] fp8 or int8
    weight: torch.Tensor,  # [N, K], as q
    x_scale: torch.Tensor,  # [M, K / groups[1]] or [M]
    weight_scale: torch.Tensor,  # [N / groups[0], K / groups[1]] or [N]
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    groups: Groups | None = None,  # None: a scale per row and output
    config: ScaledConfig | None = None,  # default: by the table
) -> torch.Tensor:
    """May be captured in a CUDA graph after `has_library_blocks`."""
    if not use_triton(q):
        return skinny_linear_torch(
            q, weight, bias, weight_scale=weight_scale, x_scale=x_scale, out_dtype=out_dtype, groups=groups
        )
    from quire.kernels.triton import scaled_linear as kernel

    if config is None:
        (rows, k), n = q.shape, len(weight)
        if groups is not None:
            can = groups == LIBRARY_GROUPS and k % 512 == 0 and n % 128 == 0 and has_library_blocks(q.device)
            config = choose("blocks", rows, k, n, can)
        else:
            can = rows > 16 and k % 8 == 0 and n % 8 == 0
            config = choose("int8", rows, k, n, can)
    if config is not None:
        return kernel.scaled_linear(q, weight, x_scale, weight_scale, bias, out_dtype, groups, config)
    if groups is not None:
        y = _library_blocks(q, weight, x_scale, weight_scale).to(out_dtype)
        return y if bias is None else y.add_(bias)
    return kernel.scale_products(torch._int_mm(q, weight.t()), x_scale, weight_scale, bias, out_dtype)


def _library_blocks(
    q: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """The library reads scales in steps of 16 bytes, so that rows are padded to a multiple of four."""
    rows, kind = len(q), F.ScalingType
    if rows % 4:
        padded = -(-rows // 4) * 4
        q = torch.cat((q.view(torch.uint8), q.new_zeros(padded - rows, q.shape[1]).view(torch.uint8))).view(q.dtype)
        x_scale = F.pad(x_scale.t(), (0, padded - rows)).t()
    y = F.scaled_mm(
        q, weight.t(), x_scale, kind.BlockWise1x128, weight_scale.t(), kind.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return y[:rows]


@functools.cache
def has_library_blocks(device: torch.device) -> bool:
    """Whether torch multiplies fp8 with scales per block here: by trying, as it depends on device and versions."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or not hasattr(F, "scaled_mm"):
        return False
    x, weight = (torch.randn(128, 512, device=device, dtype=torch.bfloat16) for _ in range(2))
    q, x_scale = quantize_fp8(x, group=128)
    in_fp8, weight_scale = weight.to(FP8), torch.full((1, 4), 0.5, device=device)
    try:
        found = _library_blocks(q, in_fp8, x_scale, weight_scale).float()
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False
    wanted = skinny_linear_torch(
        q, in_fp8, weight_scale=weight_scale, x_scale=x_scale, groups=LIBRARY_GROUPS, out_dtype=torch.float32
    )
    return bool((found - wanted).norm() < 0.01 * wanted.norm())


def dequantize_fp8_torch(
    weight: torch.Tensor, scale: torch.Tensor, groups: Groups | None, dtype: torch.dtype
) -> torch.Tensor:
    """[.., N, K] fp8 -> dtype: the product in float32, rounded once. `scale` as in `scaled_linear`."""
    return (weight.float() * (scale[..., None] if groups is None else expand_scales(scale, groups))).to(dtype)


def dequantize_fp8(
    weight: torch.Tensor, scale: torch.Tensor, groups: Groups | None, dtype: torch.dtype
) -> torch.Tensor:
    if not use_triton(weight):
        return dequantize_fp8_torch(weight, scale, groups, dtype)
    from quire.kernels.triton import scaled_linear as kernel

    return kernel.dequantize_fp8(weight, scale, groups, dtype)
