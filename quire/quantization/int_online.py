"""Weights quantized to 8 or 4 bits while loading, on a GPU (kernels/int_linear.py)."""

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.int_linear import PLANES, pack_int_weight, prepare_int_linear
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition, keep
from quire.quantization.block_quantized import BlockQuantizedWeight
from quire.quantization.int_kernels import MultipliesByKernel
from quire.quantization.int_triton import IntPart, TritonIntKernel, keep_parts
from quire.quantization.staging import Staging

ROWS_AT_A_TIME = 4096  # limits the float32 copies


def quantize_int(
    weight: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[N, K] -> codes uint8 [N, K], scales [N, groups] in the weight's dtype, and for 4 bits zero points [N, groups].

    4 bits span the smallest to the largest of a group, zero among them; 8 bits are symmetric.
    """
    parts = [_quantize_rows(rows, bits, group_size) for rows in weight.split(ROWS_AT_A_TIME)]
    codes, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return codes, scales, torch.cat([part[2] for part in parts]) if bits == 4 else None


def _quantize_rows(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, ...]:
    groups = weight.float().unflatten(-1, (-1, group_size))
    top = (1 << bits) - 1
    if bits == 4:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = _nonzero(((high - low) / top).to(weight.dtype))
        zeros = (-low / scales.float()).round().clamp(0, top)
    else:
        scales = _nonzero((groups.abs().amax(-1) / (top // 2)).to(weight.dtype))
        zeros = torch.full_like(scales, (top + 1) // 2, dtype=torch.float32)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.flatten(-2).to(torch.uint8), scales, zeros.to(torch.int16)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """A group of zeros must not divide by zero."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


@dataclass(frozen=True)
class OnlineIntLinearMethod(MultipliesByKernel):
    """Quantizes a layer as soon as its parts are loaded: the model is never in memory unquantized."""

    bits: int
    kernel: TritonIntKernel

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if in_features % PLANES[-1]:
            raise ValueError(
                f"int8 and int4 need layers whose inputs are a multiple of {PLANES[-1]}; one has {in_features}"
            )
        keep(layer, "block_weight", BlockQuantizedWeight(in_features, out_partition_sizes, dtype))  # its sizes alone
        keep(layer, "staged", ((sum(out_partition_sizes), in_features), dtype, device))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        shape, dtype, device = layer.staged  # type: ignore[misc]
        group_size = next(size for size in PLANES if shape[1] % size == 0)

        def finish(weight: torch.Tensor) -> None:
            codes, scales, zeros = quantize_int(weight, self.bits, group_size)
            keep_parts(layer, [IntPart(pack_int_weight(codes, scales, zeros, self.bits, dtype), None)])

        return Staging(shape, dtype, device, len(partitions), finish).slots(partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        assert hasattr(layer, "int_parts"), "not all parts of the weight were loaded"
        _, _, device = layer.staged  # type: ignore[misc]
        prepare_int_linear(device)


class OnlineIntQuantization:
    """For all linear layers except the head."""

    ignored: tuple[str, ...] = ()

    def __init__(self, bits: int, dtype: torch.dtype) -> None:
        self.bits, self.dtype = bits, dtype

    def linear_method(self, name: str) -> LinearMethod | None:
        return OnlineIntLinearMethod(self.bits, TritonIntKernel(self.dtype))

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        scales = "a scale" if self.bits == 8 else "a scale and a zero point"
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"int{self.bits}: weights quantized while loading, {scales} per {PLANES[0]} inputs (or a divisor of it); "
            f"activations, embedding and head in {compute}"
        )
