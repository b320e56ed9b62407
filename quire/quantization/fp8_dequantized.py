"""fp8 checkpoints on devices without fp8 arithmetic: dequantized while loading."""

from dataclasses import dataclass, field

import torch
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition, keep
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.fp8_scales import CheckpointScales, scales_of
from quire.quantization.unquantized import UnquantizedLinearMethod

ROWS_AT_A_TIME = 1024  # limits the float32 copy


@dataclass(frozen=True)
class DequantizedFp8LinearMethod(UnquantizedLinearMethod):
    """Dequantizes fp8 weights to the compute dtype, q * scale rounded once; from then on they are unquantized."""

    scheme: Fp8Scheme
    module: str = field(default="a linear layer", compare=False)  # for messages; of a fused layer, one of them

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().create_weights(layer, in_features, out_partition_sizes, dtype, device)
        keep(layer, "checkpoint_scales", CheckpointScales(self.scheme, device))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        return super().load_slots(layer, partitions) | scales_of(layer).slots(partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        weight, scales = layer.weight, scales_of(layer)
        assert isinstance(weight, nn.Parameter)
        scales.check(self.module)
        for index, p in enumerate(scales.partitions):
            rows = weight.data.narrow(0, p.offset, p.size)  # fp8 values are exact in every compute dtype
            for first in range(0, p.size, ROWS_AT_A_TIME):
                some = rows[first : first + ROWS_AT_A_TIME]
                some.copy_(some.float() * scales.of_rows(index, first, first + len(some), some.shape[1]))
        del layer.checkpoint_scales
        super().process_after_loading(layer)
