"""Rows rounded to 4-bit floats by group: see quire/kernels/round_fp4.py."""

import torch
import triton
import triton.language as tl

from quire.kernels.round_fp4 import FP8_MAX, LARGEST

GROUPS = 32  # of a program


@triton.jit
def _nearest(x):
    """The nearest whole number, of two the even one: numbers of 2^23 and more have no fraction."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _kernel(
    x,  # [M, K]
    y,  # [M, K]
    K,
    x_stride,
    global_scale,
    scales,  # with BY_EXPERT [E] float32, instead of global_scale
    experts,  # [M]
    num_experts,
    EACH: tl.constexpr,  # rows of y for one of x
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MX: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if BY_EXPERT:
        expert = tl.minimum(tl.maximum(tl.load(experts + row), 0), num_experts - 1)
        global_scale = tl.load(scales + expert)
    wide = tl.load(x + (row // EACH) * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    if MX:
        bits = (largest.to(tl.int32, bitcast=True) + (1 << 21)) & 0x7F800000
        scale = tl.maximum(bits - (2 << 23), 1 << 23).to(tl.float32, bitcast=True)
        by = scale
        kept = scale
    else:
        scale = tl.minimum(tl.math.div_rn(largest, LARGEST) * global_scale, FP8_MAX)
        # To e4m3, on devices without it too: three bits of fraction, and none of its exponents is below -6.
        exponent = tl.maximum(scale.to(tl.int32, bitcast=True) >> 23, 127 - 6)
        unit = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        scale = _nearest(scale / unit) * unit
        by = tl.math.div_rn(tl.where(scale > 0, scale, 1.0), global_scale)
        # Divided by the global scale's power of two, exactly; the rest of it is part of the weight's scale.
        power = (tl.zeros_like(scale) + global_scale).to(tl.int32, bitcast=True) & 0x7F800000
        kept = scale * (0x7F000000 - power).to(tl.float32, bitcast=True)
    size = tl.minimum(tl.math.div_rn(tl.abs(wide), by[:, None]), LARGEST)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    made = _nearest(size / step) * step * kept[:, None]
    tl.store(y + row * K + k, tl.where(wide < 0, -made, made).to(y.dtype.element_ty), mask=k < K)


def round_fp4(
    x: torch.Tensor,
    global_scale: float | None,
    group: int,
    scales: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
    each: int = 1,
) -> torch.Tensor:
    """`global_scale` or `scales`: of NVFP4; neither: MXFP4."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, k = len(x) * each, x.shape[1]
    y = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    if rows:
        _kernel[(rows, triton.cdiv(k, GROUPS * group))](
            x, y, k, x.stride(0), global_scale or 1.0, scales, experts, 0 if scales is None else len(scales),
            EACH=each, GROUP=group, GROUPS=GROUPS, MX=global_scale is None and scales is None,
            BY_EXPERT=scales is not None, LARGEST=LARGEST, FP8_MAX=FP8_MAX, num_warps=4,
        )  # fmt: skip
    return y
