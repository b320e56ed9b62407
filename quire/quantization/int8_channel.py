"""Weights quantized to int8 while loading, a scale per output, and activations to int8 by token and group, on a CPU."""

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.native.int8 import GROUP, Int8Weight, int8_linear, pack_int8, quantize_channels
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition, keep
from quire.quantization.block_quantized import BlockQuantizedWeight
from quire.quantization.fused_linear import FusedLinearMixin
from quire.quantization.staging import Staging


@dataclass(frozen=True)
class Int8ChannelLinearMethod(FusedLinearMixin):
    """Quantizes a layer as soon as its parts are loaded. The same product serves one row and thousands."""

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        keep(layer, "block_weight", BlockQuantizedWeight(in_features, out_partition_sizes, dtype))  # its sizes alone
        keep(layer, "staged", ((sum(out_partition_sizes), in_features), dtype, device))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        def finish(weight: torch.Tensor) -> None:
            keep(layer, "int8_weight", pack_int8(*quantize_channels(weight)))

        shape, dtype, device = layer.staged  # type: ignore[misc]
        return Staging(shape, dtype, device, len(partitions), finish).slots(partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        assert hasattr(layer, "int8_weight"), "not all parts of the weight were loaded"

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: Int8Weight = layer.int8_weight  # type: ignore[assignment]
        return int8_linear(x, weight, bias)


class Int8ChannelQuantization:
    """For all linear layers except the head."""

    ignored: tuple[str, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear_method(self, name: str) -> LinearMethod | None:
        return Int8ChannelLinearMethod()

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"int8_per_channel: weights quantized while loading, a scale per output; activations rounded to int8 by "
            f"token and {GROUP} inputs for products; embedding, head and all else in {compute}"
        )
