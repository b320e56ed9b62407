"""GGUF weights that stay quantized on a GPU, embedding and head included (kernels/int_linear.py)."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.int_linear import (
    PANEL,
    PackedIntWeight,
    check_groups,
    dequantize,
    join_outputs,
    lookup,
    pack_int_weight,
    prepare_int_linear,
)
from quire.kernels.int_linear import can_fuse as can_fuse_int
from quire.kernels.rms_norm import RMSNormParams, rms_norm
from quire.kernels.silu_mul import silu_mul
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition, keep
from quire.quantization.block_quantized import StoredBlocks
from quire.quantization.gguf_blocks import FORMATS, decode
from quire.quantization.int_triton import IntPart, TritonIntKernel, keep_parts
from quire.quantization.unquantized import UnquantizedLinearMethod

logger = logging.getLogger("quire")

DENSE = UnquantizedLinearMethod()
FLOATS = ("F32", "F16", "BF16")
ELEMENTS_AT_A_TIME = 1 << 26  # decoded; limits what is needed beside the packed weight

Part = PackedIntWeight | torch.Tensor  # a tensor if it is not quantized, or its type has no kernel: dequantized


class GGUFWeight:
    """The weight of a layer in parts, one per checkpoint tensor; their outputs are concatenated."""

    def __init__(self, inputs: int, outputs: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.inputs, self.outputs, self.dtype, self.device = inputs, outputs, dtype, device
        self.parts: list[Part | None] = [None] * len(outputs)

    @property
    def numel(self) -> int:
        return self.inputs * sum(self.outputs)

    def loaded(self) -> list[Part]:
        parts = [part for part in self.parts if part is not None]
        assert len(parts) == len(self.parts), "not all parts of the weight were loaded"
        return parts

    def products(self) -> list[Part]:
        """Neighbours of one kind as one weight; those that differ are multiplied one by one."""
        found: list[Part] = []
        for _, alike in groupby(self.loaded(), lambda part: getattr(part, "joins", None)):
            parts = list(alike)
            packed = [part for part in parts if isinstance(part, PackedIntWeight)]
            dense = [part for part in parts if isinstance(part, torch.Tensor)]
            if packed:
                joined = join_outputs(packed)
                found += parts if joined is None else [joined]
            else:
                found.append(dense[0] if len(dense) == 1 else torch.cat(dense))
        return found


@dataclass(frozen=True)
class GGUFSlot(LoadSlot):
    weight: GGUFWeight | None = None
    index: int = 0

    def load_directly(self, tensor: object) -> bool:
        assert self.weight is not None
        if not isinstance(tensor, StoredBlocks) or tensor.type_name in FLOATS:
            return False
        if tensor.type_name not in FORMATS:
            _log_dequantized(self.weight.dtype, f"there is no kernel for {tensor.type_name}")
            return False
        kind, (rows, columns) = FORMATS[tensor.type_name], self.view.shape
        try:
            check_groups(columns, kind.group_size, kind.bits)
        except ValueError as error:
            _log_dequantized(self.weight.dtype, f"{tensor.type_name}: {error}")
            return False
        if columns % kind.elements or (self.dim == 1 and self.start % kind.elements):
            _log_dequantized(self.weight.dtype, f"{columns} inputs of a worker are no whole {tensor.type_name} blocks")
            return False
        blocks, half = tensor.raw(), tensor.rotary_half
        if half:  # pairs are neighbours in the file and half a head apart here
            blocks = blocks.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)
        if self.dim == 0:
            blocks = blocks[self.start : self.start + rows]
        else:
            first = self.start // kind.elements * kind.nbytes
            blocks = blocks[:, first : first + columns // kind.elements * kind.nbytes]
        self.weight.parts[self.index] = pack_blocks(tensor.type_name, blocks, self.weight.dtype, self.weight.device)
        return True

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        assert self.weight is not None
        numbers = torch.empty(self.view.shape, dtype=self.weight.dtype, device=self.weight.device)
        yield numbers
        self.weight.parts[self.index] = numbers


def pack_blocks(type_name: str, blocks: torch.Tensor, dtype: torch.dtype, device: torch.device) -> PackedIntWeight:
    """From a file's rows, uint8 [rows, bytes per row], decoded on the device."""
    kind = FORMATS[type_name]
    columns = blocks.shape[1] // kind.nbytes * kind.elements
    step = max(1, ELEMENTS_AT_A_TIME // columns // PANEL) * PANEL
    packed = []
    for rows in blocks.split(step):
        found = decode(type_name, rows.to(device))
        packed.append(
            pack_int_weight(found.codes, found.scales, None, found.bits, dtype, found.kind, centres=found.centres)
        )
    joined = join_outputs(packed)
    assert joined is not None
    return joined


@dataclass(frozen=True)
class GGUFLinearMethod:
    """Keeps tensors as codes and scales if their type has a kernel; a layer without any is an unquantized one."""

    dtype: torch.dtype

    @property
    def kernel(self) -> TritonIntKernel:
        return TritonIntKernel(self.dtype)

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        keep(layer, "block_weight", GGUFWeight(in_features, out_partition_sizes, dtype, device))

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        keep(layer, "block_weight", owner.block_weight)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        weight: GGUFWeight = layer.block_weight  # type: ignore[assignment]
        outline = torch.empty(sum(weight.outputs), weight.inputs, dtype=weight.dtype, device="meta")
        return {
            ("weight", p.shard): GGUFSlot(
                outline.narrow(0, p.offset, p.size), p.full_shape, p.dim, p.start, weight=weight, index=index
            )
            for index, p in enumerate(partitions)
        }

    def process_after_loading(self, layer: nn.Module) -> None:
        weight: GGUFWeight = layer.block_weight  # type: ignore[assignment]
        products = weight.products()
        if len(weight.outputs) > 1:
            weight.parts = [None] * len(weight.outputs)  # the products hold them
        if len(products) == 1 and isinstance(products[0], torch.Tensor):
            layer.weight = nn.Parameter(products[0], requires_grad=False)
            DENSE.process_after_loading(layer)
            return
        keep_parts(layer, [IntPart(part, None) for part in products])
        prepare_int_linear(weight.device)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        method = self.kernel if hasattr(layer, "int_parts") else DENSE
        return method.apply(layer, x, bias)

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        weight: GGUFWeight = layer.block_weight  # type: ignore[assignment]
        (part,) = weight.loaded()
        return lookup(part, ids) if isinstance(part, PackedIntWeight) else F.embedding(ids, part)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        parts: list[IntPart] | None = getattr(layer, "int_parts", None)
        if parts is None:
            return layer.weight.data  # type: ignore[return-value]
        weights = [part.weight for part in parts]
        return torch.cat([w if isinstance(w, torch.Tensor) else dequantize(w) for w in weights])

    def can_fuse(self, layer: nn.Module) -> bool:
        parts: list[IntPart] | None = getattr(layer, "int_parts", None)
        if parts is None:
            return DENSE.can_fuse(layer)
        return all(isinstance(part.weight, PackedIntWeight) and can_fuse_int(part.weight) for part in parts)

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        parts: list[IntPart] | None = getattr(layer, "int_parts", None)
        if parts is None or len(parts) == 1:
            method = DENSE if parts is None else self.kernel
            return method.apply_fused(layer, x, bias, norm, residual, silu)
        # Several products share one norm; other layers are fused nevertheless.
        outputs = self.kernel.apply(layer, x if norm is None else rms_norm(x, *norm), bias)
        outputs = silu_mul(outputs) if silu else outputs
        return outputs if residual is None else outputs + residual


class GGUFPackedQuantization:
    """Keeps the tensors of a GGUF file quantized on a GPU."""

    ignored: tuple[str, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear_method(self, name: str) -> GGUFLinearMethod:
        return GGUFLinearMethod(self.dtype)

    def vocab_method(self) -> GGUFLinearMethod:
        return GGUFLinearMethod(self.dtype)

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"gguf: weights stay quantized ({', '.join(FORMATS)}; other types become {compute}); activations and "
            f"products in {compute}"
        )


@functools.cache
def _log_dequantized(dtype: torch.dtype, why: str) -> None:
    """Once for each reason."""
    compute = str(dtype).removeprefix("torch.")
    logger.warning("a weight, perhaps with others, is dequantized to %s: %s", compute, why)
