"""LayerNorm of a row, optionally of the sum with a residual."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch


@triton.jit
def _layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # Rounded before the norm, as in rms_norm.
        total = values.to(tl.float32) + tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        values = total.to(values.dtype)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps) * gain
    if HAS_BIAS:
        normed += shift
    tl.store(out + row + columns, normed.to(values.dtype), mask=inside)


def layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The sum, if any, overwrites the residual."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _layer_norm_kernel[(x.numel() // width,)](
        x,
        residual,
        weight,
        bias,
        out,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early_launch(x),
    )
    return out
