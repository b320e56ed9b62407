"""A worked example of a quantization method: int8 codes with a scale per output, or per tensor. One file and one
registration.

The checkpoint names its tensors `qweight` and `qscale`; its quantization_config says which layers have which scheme.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.quantization.base import LinearMethod, Partition, VocabMethod
from quire.quantization.select import register_quantization

NAME = "scaled-int8"


@dataclass(frozen=True)
class ScaledInt8LinearMethod:
    per_output: bool

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        outputs = sum(out_partition_sizes)
        layer.codes = new_parameter(outputs, in_features, dtype=torch.int8, device=device)
        layer.scales = new_parameter(
            outputs if self.per_output else len(out_partition_sizes), dtype=dtype, device=device
        )

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        slots: dict[tuple[str, ShardId], LoadSlot] = {}
        for i, p in enumerate(partitions):
            slots["qweight", p.shard] = LoadSlot(
                layer.codes.data.narrow(0, p.offset, p.size), p.full_shape, p.dim, p.start
            )
            if self.per_output:
                scales, start = layer.scales.data.narrow(0, p.offset, p.size), p.start if p.dim == 0 else 0
                slots["qscale", p.shard] = LoadSlot(scales, p.full_shape[:1], 0, start)
            else:
                slots["qscale", p.shard] = LoadSlot(layer.scales.data.narrow(0, i, 1), (1,))
        if not self.per_output:
            layer.register_buffer("sizes", torch.tensor([p.size for p in partitions], device=layer.codes.device))
        return slots

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.codes.to(x.dtype) * layer.scales[:, None], bias)

    def can_fuse(self, layer: nn.Module) -> bool:
        return False

    def apply_fused(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_after_loading(self, layer: nn.Module) -> None:
        if not self.per_output:
            layer.scales = nn.Parameter(layer.scales.repeat_interleave(layer.sizes), requires_grad=False)


class ScaledInt8:
    ignored: tuple[str, ...] = ()

    def __init__(self, stored: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.unquantized, self.per_tensor = stored.get("unquantized", ()), stored.get("per_tensor", ())

    def linear_method(self, name: str) -> LinearMethod | None:
        if any(part in name for part in self.unquantized):
            return None
        return ScaledInt8LinearMethod(per_output=not any(part in name for part in self.per_tensor))

    def vocab_method(self) -> VocabMethod | None:
        return None

    def describe(self) -> str:
        return "scaled-int8: made up for a test"


def register() -> None:
    register_quantization(NAME, ScaledInt8)
