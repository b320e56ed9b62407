"""The scales that come with a checkpoint's fp8 weights."""

import math

import torch
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition
from quire.quantization.fp8_config import Fp8Scheme

MIN_GROUPS = (16, 32)  # outputs and inputs of a tile of a kernel


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

    def check(self, module: str) -> None:
        """A ValueError if the checkpoint's scales cannot be meant. Those of experts' inputs are not used (see
        fp8_experts.py): experts that no text of the calibration has reached have zeros."""
        if not all(bool(scale.isfinite().all()) for scale in self.weight):
            raise ValueError(f"{module}: its {self.scheme.scale_name} are not all finite numbers")
        if self.scheme.activations == "static" and ".experts." not in module:
            found = torch.cat(self.input).tolist()
            if not all(0 < scale < math.inf for scale in found):
                raise ValueError(f"{module}: its input_scale is {found}; allowed: positive numbers")

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

    def groups(self, module: str, inputs: int) -> tuple[int, int]:
        """Outputs and inputs that share a scale, as kernels need them: in all partitions, powers of two."""
        assert self.scheme.block is not None
        rows, columns = self.scheme.block
        for p in self.partitions:
            start = p.start if p.dim == 0 else 0
            rows = math.gcd(rows, p.size, start)
            columns = math.gcd(columns, inputs, p.start - start)
        found = rows & -rows, columns & -columns
        if found[0] < MIN_GROUPS[0] or found[1] < MIN_GROUPS[1]:
            raise ValueError(
                f"{module}: scales per block of {self.scheme.block} are for {found[0]} outputs and {found[1]} inputs "
                f"of this worker's part, {[p.size for p in self.partitions]} outputs of {inputs} inputs; allowed: at "
                f"least {MIN_GROUPS[0]} and {MIN_GROUPS[1]}, or quantization 'dequantized'"
            )
        return found

    def by_group(self, groups: tuple[int, int], inputs: int) -> torch.Tensor:
        """[N / groups[0], inputs / groups[1]]."""
        assert self.scheme.block is not None
        (rows, columns), parts = self.scheme.block, []
        for p, scale in zip(self.partitions, self.weight, strict=True):
            start = (p.start, 0) if p.dim == 0 else (0, p.start)
            row = torch.arange(start[0], start[0] + p.size, groups[0], device=self.device) // rows
            column = torch.arange(start[1], start[1] + inputs, groups[1], device=self.device) // columns
            parts.append(scale[row][:, column])
        return torch.cat(parts).contiguous()

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
