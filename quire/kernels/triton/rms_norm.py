"""RMSNorm of a row, optionally of the sum with a residual."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, width, x_row, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + tl.program_id(0).to(tl.int64) * x_row + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # The sum is rounded before the norm, as in the torch reference: the next layer reads the rounded one.
        total = values.to(tl.float32) + tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        values = total.to(values.dtype)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * gain
    tl.store(out + row + columns, normed.to(values.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of x [N, D] may be slices of wider ones."""
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum overwrites `residual`."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        residual,
        weight,
        out,
        width,
        x.stride(-2) if x.dim() > 1 else width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=warps,
        **early_launch(x),
    )
