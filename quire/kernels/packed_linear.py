"""A linear layer's bf16 weight on a CPU, packed once into the form that is fastest to multiply by."""

from collections.abc import Callable

import torch

from quire.kernels import native
from quire.platforms.cpu_facts import onednn_may_use_amx

Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # x [M, K], bias [N] -> [M, N]


def pack_weight(weight: torch.Tensor) -> Multiply | None:
    """The product with `weight` [N, K], which is not needed any more; None where a plain one is as good.

    Our own kernels wherever they are compiled: a call of oneDNN costs tens of microseconds before it multiplies, three
    times what one row takes, and torch has no good bf16 product for a processor without bf16 instructions. The one
    exception is an AMX that oneDNN can use and we cannot.
    """
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    if native.linear_kind() is not None and (native.has_amx() or not onednn_may_use_amx()):
        num_outputs, ours = weight.shape[0], native.pack_linear(weight)
        return lambda x, bias: native.linear(x, ours, num_outputs, bias)
    if not torch.backends.mkldnn.is_available() or not _has_packing_ops():
        return None
    # Twice as fast at one row, and 10 to 30% at 64, than leaving oneDNN to reorder the weight in every call.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _has_packing_ops() -> bool:
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
