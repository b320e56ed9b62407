"""One program per row, which holds it in registers: x is read once for both its maximum and its quantized values.

To fp8 or int8, with a scale per row, a scale per group of a row, or a fixed one.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.quantize_fp8 import FP8, LARGEST, SMALLEST_MAX, Quantized

QUANTIZE, NORM, ADD_NORM, SILU = 0, 1, 2, 3


@triton.jit
def _larger(a, b):
    """The maximum; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x,  # [M, K], with SILU [M, 2 * K]
    residual,  # with ADD_NORM [M, K]; becomes the sum
    weight,  # with NORM [K]
    fixed_scale,  # [1], or None
    q,  # [M, K] fp8 or int8
    scales,  # [M] float32; with GROUP [K / GROUP, M]
    K,
    x_stride,
    rows,
    eps,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all of a row
    LARGEST: tl.constexpr,
    SMALLEST_MAX: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    at = x + row * x_stride + k
    values = tl.load(at, mask=inside, other=0.0)
    # Rounded where the separate kernels round, so that fusing changes no bit.
    if MODE == 2:
        before = tl.load(residual + row * K + k, mask=inside, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + before).to(values.dtype)
        tl.store(residual + row * K + k, values, mask=inside)
    if MODE == 1 or MODE == 2:
        wide = values.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
        gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
        values = (wide * factor * gain).to(values.dtype)
    if MODE == 3:
        gate = values.to(tl.float32)
        up = tl.load(at + K, mask=inside, other=0.0)
        values = ((gate / (1.0 + tl.exp(-gate))) * up.to(tl.float32)).to(up.dtype)
    wide = values.to(tl.float32)
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK // GROUP
        by_group = tl.reshape(wide, [GROUPS, GROUP])
        largest = _larger(tl.reduce(tl.abs(by_group), 1, _larger), SMALLEST_MAX)
        g = tl.arange(0, GROUPS)
        tl.store(scales + g.to(tl.int64) * rows + row, largest * (1.0 / LARGEST), mask=g * GROUP < K)
        inverse = tl.math.div_rn(tl.full([GROUPS], LARGEST, tl.float32), largest)
        scaled = tl.reshape(by_group * inverse[:, None], [BLOCK])
    else:
        if HAS_SCALE:
            scale = tl.load(fixed_scale).to(tl.float32)
            inverse = tl.math.div_rn(1.0, scale)
        else:
            row_max = _larger(tl.reduce(tl.abs(wide), 0, _larger), SMALLEST_MAX)
            scale = row_max * (1.0 / LARGEST)
            inverse = tl.math.div_rn(LARGEST, row_max)
        tl.store(scales + row, scale)
        scaled = wide * inverse
    quantized = tl.minimum(_larger(scaled, -LARGEST), LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if q.dtype.element_ty == tl.int8:
        quantized = (quantized + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: to the nearest, of two the even one
    tl.store(q + row * K + k, quantized.to(q.dtype.element_ty), mask=inside)


def quantize(x: torch.Tensor, scale: torch.Tensor | None, group: int = 0, dtype: torch.dtype = FP8) -> Quantized:
    return _launch(QUANTIZE, x, x.shape[-1], None, None, 0.0, scale, group, dtype)


def rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum overwrites `residual`."""
    mode = NORM if residual is None else ADD_NORM
    return *_launch(mode, x, x.shape[-1], residual, weight, eps, scale, group), x if residual is None else residual


def silu_mul_quant(gate_up: torch.Tensor, scale: torch.Tensor | None, group: int = 0) -> Quantized:
    return _launch(SILU, gate_up, gate_up.shape[-1] // 2, None, None, 0.0, scale, group)


def _launch(
    mode: int,
    x: torch.Tensor,
    k: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor | None,
    group: int,
    dtype: torch.dtype = FP8,
) -> Quantized:
    rows = x.shape[0]
    q = torch.empty(rows, k, dtype=dtype, device=x.device)
    scales = torch.empty((k // group, rows) if group else rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(k)
        _kernel[(rows,)](
            x, residual, weight, scale, q, scales, k, x.stride(0), rows, eps,
            BLOCK=block, MODE=mode, HAS_SCALE=scale is not None, GROUP=group, LARGEST=LARGEST[dtype],
            SMALLEST_MAX=SMALLEST_MAX, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return q, scales.t() if group else scales
