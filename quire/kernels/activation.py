"""Activations of a feed-forward block, with or without a gate."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.dispatch import use_triton
from quire.kernels.silu_mul import silu_mul

SILU = "silu"


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# By their names in configs.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


# Their numbers in the kernels.
_KINDS = {F.silu: 0, _gelu_tanh: 1, F.gelu: 2, F.relu: 3}


def kernel_number(name: str) -> int:
    return _KINDS[ACTIVATIONS[name]]


def activate_torch(x: torch.Tensor, name: str) -> torch.Tensor:
    return ACTIVATIONS[name](x)


def activate_mul_torch(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """[N, 2 * I], gate before up -> [N, I]: activation(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[name](gate) * up


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """[N, I]"""
    result = _by_kernel(x, name, gated=False)
    return activate_torch(x, name) if result is None else result


def activate_mul(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    if name == SILU:
        return silu_mul(gate_up)
    result = _by_kernel(gate_up, name, gated=True)
    return activate_mul_torch(gate_up, name) if result is None else result


def _by_kernel(x: torch.Tensor, name: str, gated: bool) -> torch.Tensor | None:
    kind = kernel_number(name)
    if use_triton(x):
        from quire.kernels.triton import activation as kernel

        return kernel.activate(x, kind, gated)
    return native.activate(x, kind, gated) if native.serves(x) else None
