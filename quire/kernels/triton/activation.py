"""Activations of an MLP, with or without a gate."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch

BLOCK = 1024


@triton.jit
def _activate_kernel(
    x, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = x + row * width * (2 if GATED else 1)
    values = tl.load(start + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    if KIND == 0:  # silu
        result = wide / (1.0 + tl.exp(-wide))
    elif KIND == 1:  # gelu, tanh
        result = wide / (1.0 + tl.exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)))
    elif KIND == 2:  # gelu
        result = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:  # relu
        result = tl.where(wide < 0.0, 0.0, wide)  # keeps NaN
    if GATED:
        result *= tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, result.to(values.dtype), mask=inside)


def activate(x: torch.Tensor, kind: int, gated: bool) -> torch.Tensor:
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _activate_kernel[(rows, triton.cdiv(width, BLOCK))](
        x, out, width, KIND=kind, GATED=gated, BLOCK=BLOCK, num_warps=4, **early_launch(out)
    )
    return out
