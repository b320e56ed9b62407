"""Block-quantized weights (GGUF, int8, int4) that stay quantized on a CPU (kernels/native/quantized.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.native import TYPES, quantized
from quire.kernels.packed_linear import Multiply, pack_weight
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition, keep
from quire.quantization.fused_linear import FusedLinearMixin

Part = quantized.Packed | torch.Tensor  # a tensor if its type has no kernel: dequantized


@runtime_checkable
class StoredBlocks(Protocol):
    """A checkpoint tensor that can be read in its stored, quantized form."""

    type_name: str
    rotary_half: int  # see kernels/native/quantized.py: pack

    def raw(self) -> torch.Tensor: ...


class BlockQuantizedWeight:
    """The weight of a layer in parts, one per checkpoint tensor; their outputs are concatenated."""

    def __init__(self, inputs: int, outputs: list[int], dtype: torch.dtype) -> None:
        self.inputs, self.outputs, self.dtype = inputs, outputs, dtype
        self.parts: list[Part | None] = [None] * len(outputs)
        # Of the inputs of a quantized part: its input j is x[:, order[j]]; None: as they are.
        self.orders: list[torch.Tensor | None] = [None] * len(outputs)
        self.is_shared = False
        self._fused: quantized.Fused | None = None
        self._order: torch.Tensor | None = None
        self._products: list[Multiply] = []

    @property
    def numel(self) -> int:
        return self.inputs * sum(self.outputs)

    def finish(self) -> None:
        """Call when all parts are loaded: one kernel call multiplies by all if all are quantized, else one per part."""
        parts = self._loaded()
        packed = [part for part in parts if isinstance(part, quantized.Packed)]
        if len(packed) == len(parts) and all(_same_order(order, self.orders[0]) for order in self.orders):
            self._fused, self._order = quantized.fuse(packed), self.orders[0]
        else:
            pairs = zip(parts, self.orders, strict=True)
            self._products = [_product(part, self.is_shared, order) for part, order in pairs]
            if not self.is_shared:
                self.parts = list(packed)  # products hold the others

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._fused is not None:
            return quantized.linear(x if self._order is None else x.index_select(1, self._order), self._fused, bias)
        biases = [None] * len(self.outputs) if bias is None else bias.split(self.outputs)
        return torch.cat([product(x, b) for product, b in zip(self._products, biases, strict=True)], dim=1)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        (part,) = self._loaded()
        if isinstance(part, quantized.Packed):
            return quantized.lookup(ids, part, self.dtype)
        return F.embedding(ids, part)

    def _loaded(self) -> list[Part]:
        parts = [part for part in self.parts if part is not None]
        assert len(parts) == len(self.parts), "not all parts of the weight were loaded"
        return parts


def _product(part: Part, is_shared: bool, order: torch.Tensor | None) -> Multiply:
    if isinstance(part, quantized.Packed):
        fused = quantized.fuse([part])
        return lambda x, bias: quantized.linear(x if order is None else x.index_select(1, order), fused, bias)
    packed = None if is_shared else pack_weight(part)  # the other layer needs it unpacked
    return packed or (lambda x, bias: F.linear(x, part, bias))


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


@dataclass(frozen=True)
class BlockQuantizedSlot(LoadSlot):
    weight: BlockQuantizedWeight | None = None
    index: int = 0
    target: str | None = None  # format to quantize to while loading; None: keep the stored one

    def load_directly(self, tensor: object) -> bool:
        if self.target is not None or not isinstance(tensor, StoredBlocks):
            return False
        kind = quantized.FORMATS.get(tensor.type_name)
        rows, columns = self.view.shape
        blocks, first = tensor.raw(), 0
        if kind is None or columns % kind.elements:
            return False
        if self.dim == 0:
            first = self.start
        elif self.start % kind.elements == 0:
            blocks = blocks[:, self.start // kind.elements * kind.nbytes :]
        else:
            return False
        assert self.weight is not None
        self.weight.parts[self.index] = quantized.pack(
            tensor.type_name, blocks, columns, range(first, first + rows), tensor.rotary_half
        )
        return True

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        assert self.weight is not None
        unquantized = torch.empty(self.view.shape, dtype=self.weight.dtype)
        yield unquantized
        part = quantized.quantize(self.target, unquantized) if self.target else unquantized
        self.weight.parts[self.index] = part


@dataclass(frozen=True)
class BlockQuantizedLinearMethod(FusedLinearMixin):
    """Keeps GGUF tensors in their stored format if it has a kernel; with `target`, quantizes every tensor to it."""

    target: str | None = None

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if self.target is not None and in_features % quantized.GROUP:
            raise ValueError(
                f"int8 and int4 need layers whose inputs are a multiple of {quantized.GROUP}; one has {in_features}"
            )
        keep(layer, "block_weight", BlockQuantizedWeight(in_features, out_partition_sizes, dtype))

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        weight_of(owner).is_shared = True
        keep(layer, "block_weight", weight_of(owner))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        weight = weight_of(layer)
        return {
            ("weight", p.shard): BlockQuantizedSlot(
                torch.empty(p.size, weight.inputs, dtype=weight.dtype, device="meta"),
                p.full_shape, p.dim, p.start, weight=weight, index=index, target=self.target,
            )
            for index, p in enumerate(partitions)
        }  # fmt: skip

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: BlockQuantizedWeight = layer.block_weight  # type: ignore[assignment]
        return weight.multiply(x, bias)

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return weight_of(layer).lookup(ids)

    def process_after_loading(self, layer: nn.Module) -> None:
        weight_of(layer).finish()


def weight_of(layer: nn.Module) -> BlockQuantizedWeight:
    weight = layer.block_weight
    assert isinstance(weight, BlockQuantizedWeight)
    return weight


def panels_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights cannot be multiplied in quantized form; None if they can."""
    if device.type != "cpu":
        return "the device is a GPU"
    if not quantized.is_available():
        return "the native kernels are not available (no C compiler, or QUIRE_NATIVE_KERNELS=0)"
    if dtype not in TYPES:
        return f"dtype is {str(dtype).removeprefix('torch.')}, and there are kernels for float32 and bfloat16 only"
    return None


def block_quantized_weights(model: nn.Module) -> list[BlockQuantizedWeight]:
    """Without duplicates: two layers may share a weight."""
    found = (getattr(module, "block_weight", None) for module in model.modules())
    return list({id(weight): weight for weight in found if weight is not None}.values())


class GGUFQuantization:
    """Keeps the tensors of a GGUF file quantized, embedding and head included."""

    ignored: tuple[str, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear_method(self, name: str) -> BlockQuantizedLinearMethod:
        return BlockQuantizedLinearMethod()

    def vocab_method(self) -> BlockQuantizedLinearMethod:
        return BlockQuantizedLinearMethod()

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"gguf: weights stay quantized ({', '.join(quantized.FORMATS)}; other types become {compute}); activations "
            f"rounded to int8 in groups of {quantized.GROUP} for products, else {compute}"
        )


class IntQuantization:
    """Weights quantized to 8 or 4 bits while loading. The embedding and head, often tied, are most sensitive and always
    get 8 bits."""

    ignored: tuple[str, ...] = ()

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def linear_method(self, name: str) -> BlockQuantizedLinearMethod:
        return BlockQuantizedLinearMethod("Q8_0" if self.bits == 8 else "Q4_1")

    def vocab_method(self) -> BlockQuantizedLinearMethod:
        return BlockQuantizedLinearMethod("Q8_0")

    def describe(self) -> str:
        scales = "a scale" if self.bits == 8 else "a scale and a minimum"
        return (
            f"int{self.bits}: weights quantized while loading, {scales} per {quantized.GROUP} inputs; activations "
            f"rounded to int8; embedding and head in 8 bits"
        )
