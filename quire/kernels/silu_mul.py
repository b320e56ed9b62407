"""SiLU of the gate times up: the torch reference, and the choice of a kernel."""

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.dispatch import use_triton


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 * I], gate before up -> [N, I]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if use_triton(gate_up):
        from quire.kernels.triton import silu_mul as kernel

        return kernel.silu_mul(gate_up)
    if native.serves(gate_up):
        return native.silu_mul(gate_up)
    return silu_mul_torch(gate_up)
