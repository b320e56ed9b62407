"""SiLU of the gate times up."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.dispatch import early_launch

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))) * up.to(tl.float32)
    tl.store(out + row * width + columns, activated.to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up, out, width, BLOCK=BLOCK, num_warps=4, **early_launch(out)
    )
    return out
