"""The scales that come with a checkpoint's fp8 weights."""

import torch
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition
from quire.quantization.fp8_config import Fp8Scheme


class CheckpointScales:
    """A layer's scales as stored (one per tensor, output or block), and those of its activations."""

    def __init__(self, scheme: Fp8Scheme, device: torch.device) -> None:
        self.scheme, self.device = scheme, device
        self.partitions: list[Partition] = []

    def slots(self, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        self.partitions = partitions
        self.weight = [self._empty(*self._stored_shape(p)) for p in partitions]
        self.input = [self._empty(1) for _ in partitions]
        slots: dict[tuple[str, ShardId], LoadSlot] = {}
        for p, weight, given in zip(partitions, self.weight, self.input, strict=True):
            slots[self.scheme.scale_name, p.shard] = _slot(weight)
            if self.scheme.activations == "static":
                slots["input_scale", p.shard] = _slot(given)
        return slots

    def by_output(self) -> torch.Tensor:
        """[N]: the scale of each output, or of its tensor."""
        return torch.cat([self.of_rows(i, 0, p.size)[:, 0] for i, p in enumerate(self.partitions)])

    def of_rows(self, index: int, first: int, last: int, columns: int = 1) -> torch.Tensor:
        """Scales of rows first to last of a partition: [rows, columns], or [rows, 1] if equal along a row."""
        p, scale = self.partitions[index], self.weight[index]
        rows = torch.arange(first, last, device=self.device)
        if p.dim == 0:
            rows += p.start
        if self.scheme.block is not None:
            in_row = torch.arange(columns, device=self.device) + (p.start if p.dim == 1 else 0)
            return scale[rows // self.scheme.block[0]][:, in_row // self.scheme.block[1]]
        return scale[rows, None] if self.scheme.per_channel else scale.expand(last - first)[:, None]

    def of_inputs(self) -> torch.Tensor | None:
        """[1]: a fused layer quantizes its input once, so the largest scale of its partitions is used."""
        return torch.cat(self.input).amax().view(1) if self.scheme.activations == "static" else None

    def _stored_shape(self, p: Partition) -> tuple[int, ...]:
        outputs, inputs = p.full_shape
        if self.scheme.block is not None:
            return -(-outputs // self.scheme.block[0]), -(-inputs // self.scheme.block[1])
        return (outputs,) if self.scheme.per_channel else (1,)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def scales_of(layer: nn.Module) -> CheckpointScales:
    """Kept on the layer until its weight is processed."""
    scales = layer.checkpoint_scales
    assert isinstance(scales, CheckpointScales)
    return scales


def _slot(scale: torch.Tensor) -> LoadSlot:
    return LoadSlot(scale, tuple(scale.shape), dummy="ones", any_shape=True)
