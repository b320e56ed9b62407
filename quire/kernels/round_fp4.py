"""Activations rounded to 4-bit floats, as checkpoints of W4A4 have it: groups of a row share a scale that is computed
from them, an e4m3 number (NVFP4) or a power of two (MXFP4)."""

import math

import torch

from quire.kernels.dispatch import use_triton

LARGEST = 6.0  # of e2m1
FP8_MAX = 448.0


def round_nvfp4_torch(x: torch.Tensor, global_scale: float | torch.Tensor, group: int = 16) -> torch.Tensor:
    """x [M, K] -> the rounded x times `mantissa(global_scale)`: e2m1 times e4m3 times a power of two, which types of 16
    bits hold exactly."""
    wide = x.float().unflatten(-1, (-1, group))
    # Divisors are tensors: a GPU multiplies by the reciprocal of a number of Python's.
    times = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device)
    scales = (wide.abs().amax(-1, keepdim=True) / torch.full_like(times, LARGEST) * times).clamp(max=FP8_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    # A group whose scale is rounded to zero is zero.
    rounded = round_e2m1(torch.where(scales > 0, wide / (scales / times), 0.0))
    power = times / (2 * torch.frexp(times).mantissa)
    return (rounded * (scales / power)).flatten(-2).to(x.dtype)


def mantissa(x: float) -> float:
    """From 1 to 2: what is left of a number without its power of two."""
    return 2 * math.frexp(x)[0]


def round_mxfp4_torch(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    """x [M, K] -> the rounded x."""
    wide = x.float().unflatten(-1, (-1, group))
    largest = wide.abs().amax(-1, keepdim=True)
    # The largest, rounded to one bit of fraction, has this power of two; 4 is that of the largest e2m1.
    bits = (largest.view(torch.int32) + (1 << 21)) & 0x7F800000
    scales = (bits - (2 << 23)).clamp(min=1 << 23).view(torch.float32)
    return (round_e2m1(wide / scales) * scales).flatten(-2).to(x.dtype)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, of two the one with an even mantissa."""
    size = x.abs().clamp(max=LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)


def round_nvfp4(x: torch.Tensor, global_scale: float, group: int = 16) -> torch.Tensor:
    if not use_triton(x):
        return round_nvfp4_torch(x, global_scale, group)
    from quire.kernels.triton import round_fp4 as kernel

    return kernel.round_fp4(x, global_scale, group)


def round_nvfp4_by_expert_torch(
    x: torch.Tensor, scales: torch.Tensor, experts: torch.Tensor, each: int = 1
) -> torch.Tensor:
    rows = x.repeat_interleave(each, 0)
    return round_nvfp4_torch(rows, scales[experts.long().clamp(0, len(scales) - 1), None, None])


def round_nvfp4_by_expert(
    x: torch.Tensor,  # [M, K]
    scales: torch.Tensor,  # [E] float32: the global scale of each expert
    experts: torch.Tensor,  # [M * each] int32; any number where the result is not used
    each: int = 1,  # experts of a row
) -> torch.Tensor:
    """[M * each, K]: x of each row, rounded for each of its experts."""
    if not use_triton(x):
        return round_nvfp4_by_expert_torch(x, scales, experts, each)
    from quire.kernels.triton import round_fp4 as kernel

    return kernel.round_fp4(x, None, 16, scales, experts, each)


def round_mxfp4(x: torch.Tensor, group: int = 32) -> torch.Tensor:
    if not use_triton(x):
        return round_mxfp4_torch(x, group)
    from quire.kernels.triton import round_fp4 as kernel

    return kernel.round_fp4(x, None, group)
