"""Linear layers whose members, fused into one (query, key, value; gate, up), are quantized in different ways."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.kernels.rms_norm import RMSNormParams
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition
from quire.quantization.unquantized import UnquantizedLinearMethod


class Member(nn.Module):
    """Holds the state of one of the methods."""

    def __init__(self, method: LinearMethod) -> None:
        super().__init__()
        self.method = method


@dataclass(frozen=True)
class MixedLinearMethod:
    """A method for each member, which are multiplied one by one. `layer.members` hold their state."""

    leaves_panels_only = True  # if the members' methods do: see models/loading/packed_cache.py
    methods: tuple[LinearMethod, ...]

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        members = [Member(method) for method in self.methods]
        for member, size in zip(members, out_partition_sizes, strict=True):
            member.method.create_weights(member, in_features, [size], dtype, device)
        layer.members = nn.ModuleList(members)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        slots: dict[tuple[str, ShardId], LoadSlot] = {}
        for member, partition in zip(_members(layer), partitions, strict=True):
            slots |= member.method.load_slots(member, [replace(partition, offset=0)])
        return slots

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        products = [member.method.apply(member, x, None) for member in _members(layer)]
        outputs = torch.cat(products, dim=-1)
        return outputs if bias is None else outputs + bias

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        raise NotImplementedError("members that differ in scheme are multiplied one by one")

    def can_fuse(self, layer: nn.Module) -> bool:
        return False

    def process_after_loading(self, layer: nn.Module) -> None:
        for member in _members(layer):
            member.method.process_after_loading(member)


def fused_method(methods: Sequence[LinearMethod | None]) -> LinearMethod | None:
    """One method for a layer fused of members with these; None: not quantized."""
    if all(method == methods[0] for method in methods):
        return methods[0]
    return MixedLinearMethod(tuple(method or UnquantizedLinearMethod() for method in methods))


def _members(layer: nn.Module) -> list[Member]:
    return layer.members  # type: ignore[return-value]
