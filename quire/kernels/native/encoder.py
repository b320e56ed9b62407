"""Kernels of encoders in C (encoder_*.c), where the processor has what they need: `serves_encoders(x)`."""

import functools

import torch

from quire.kernels import native
from quire.kernels.layer_norm import LayerNormParams

PLAIN = -1  # no activation


@functools.cache
def _has_kernels() -> bool:
    return native.library() is not None and bool(native.native_function("quire_encoder_kernels")())


def serves_encoders(x: torch.Tensor) -> bool:
    return native.serves(x) and _has_kernels()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] of either type in the form that `linear` takes."""
    if weight.dtype is torch.bfloat16:
        return native.pack_linear(weight)
    n, k = weight.shape
    packed = torch.empty(-(-n // native.PANEL), k, native.PANEL, dtype=torch.float32)
    native.native_function("quire_pack_float32")(weight.contiguous().data_ptr(), packed.data_ptr(), n, k)
    return packed


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    num_outputs: int,
    bias: torch.Tensor | None,
    activation: int = PLAIN,
    residual: torch.Tensor | None = None,
    norm: LayerNormParams | None = None,
) -> torch.Tensor:
    """x [M, K] -> [M, num_outputs], in one pass with what follows: the activation of that number of
    kernels/activation.py, or the norm of its sum with `residual` [M, num_outputs]."""
    x = x.contiguous()
    rows, k = x.shape
    out = torch.empty(rows, num_outputs, dtype=x.dtype)
    pointers = (x.data_ptr(), packed.data_ptr(), bias.data_ptr() if bias is not None else None, out.data_ptr())
    added: tuple[int | None, int | None, int | None] = (None, None, None)
    eps = 0.0
    if residual is not None and norm is not None:
        weight, shift, eps = norm
        native.require_float32(weight, shift)
        residual = residual.contiguous()
        added = (residual.data_ptr(), weight.data_ptr(), shift.data_ptr() if shift is not None else None)
    sizes = (rows, num_outputs, k)
    native.native_function("quire_encoder_linear")(*pointers, *added, *sizes, eps, activation, native.TYPES[x.dtype])
    return out


def attention(
    qkv: torch.Tensor,  # [N, (H + 2 KV) * D]
    query_start: torch.Tensor,  # [n + 1] int32
    heads: tuple[int, int, int],  # H, KV, D
    scale: float,
    window: int | None,
    bias: torch.Tensor | None,  # [H, 2 * longest - 1] float32
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    table: torch.Tensor | None,
    positions: torch.Tensor | None,  # [N] int64
) -> torch.Tensor:
    """[N, H * D]; as kernels/encoder_attention.py has it."""
    qkv = qkv.contiguous()
    num_heads, kv_heads, head_size = heads
    out = torch.empty(qkv.shape[0], num_heads * head_size, dtype=qkv.dtype)
    q_weight, k_weight, eps = (norms[0].data_ptr(), norms[1].data_ptr(), norms[2]) if norms else (None, None, 0.0)
    tables = (
        bias.data_ptr() if bias is not None else None,
        table.data_ptr() if table is not None else None,
        positions.data_ptr() if positions is not None else None,
    )
    native.native_function("quire_encoder_attention")(
        qkv.data_ptr(), out.data_ptr(), query_start.data_ptr(), *tables, q_weight, k_weight,
        qkv.shape[0], len(query_start) - 1, num_heads, kv_heads, head_size, 0 if table is None else table.shape[1],
        window or 0, 0 if bias is None else (bias.shape[1] + 1) // 2, scale, eps, native.TYPES[qkv.dtype],
    )  # fmt: skip
    return out
