"""A linear layer's bf16 weight on a CPU, packed once into the layout that is fastest to multiply by."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.kernels import native
from quire.platforms.cpu_facts import onednn_may_use_amx

Multiply = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # x [M, K], bias [N] -> [M, N]


@dataclass(frozen=True)
class Panels:
    """A weight [N, K] packed for our own kernels, and the product with it."""

    data: torch.Tensor
    num_outputs: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return native.linear(x, self.data, self.num_outputs, bias)

    @classmethod
    def of(cls, data: torch.Tensor, shape: torch.Size) -> "Panels":
        """From data that was packed before, of a weight of that shape."""
        outputs, inputs = shape
        wanted = (-(-outputs // native.PANEL), -(-inputs // 2), native.PANEL, 2)
        if data.dtype is not torch.bfloat16 or tuple(data.shape) != wanted:
            raise ValueError(f"panels of shape {list(data.shape)} are not those of a weight {list(shape)}")
        return cls(data, outputs)


def pack_weight(weight: torch.Tensor) -> Multiply | None:
    """The product with `weight` [N, K], which can be freed; None where torch's own product is as fast.

    Our own kernels wherever they are compiled: a call of oneDNN costs tens of microseconds before it multiplies, three
    times what one row takes, and torch has no good bf16 product for a processor without bf16 instructions. The one
    exception is an AMX that oneDNN can use and we cannot.
    """
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    if _packs_panels():
        return Panels(native.pack_linear(weight), weight.shape[0])
    if not torch.backends.mkldnn.is_available() or not _has_packing_ops():
        return None
    # Twice as fast at one row, and 10 to 30% at 64, than leaving oneDNN to reorder the weight in every call.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def panel_layout() -> str | None:
    """Identifies how weights are packed, to compare with that of a file; None where pack_weight makes no Panels."""
    if not _packs_panels():
        return None
    sample = torch.arange(5 * (native.PANEL + 3), dtype=torch.float32).view(-1, 5).bfloat16()
    packed = native.pack_linear(sample).view(torch.uint8).numpy().tobytes()
    return f"{native.linear_kind()} {native.PANEL} {hashlib.sha256(packed).hexdigest()}"


def _packs_panels() -> bool:
    return native.linear_kind() is not None and (native.has_amx() or not onednn_may_use_amx())


def _has_packing_ops() -> bool:
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
