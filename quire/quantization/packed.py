"""Weights that stay quantized on a CPU, and are multiplied in that form (kernels/native/quantized.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.native import quantized
from quire.kernels.packed_linear import Multiply, pack_weight
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition
from quire.quantization.fused import FusesFewRows

Part = quantized.Packed | torch.Tensor  # a plain weight where its type has no kernel


@runtime_checkable
class StoredBlocks(Protocol):
    """A checkpoint's tensor that can be had as it is stored."""

    type_name: str
    rotary_half: int  # see kernels/native/quantized.py: pack

    def raw(self) -> torch.Tensor: ...


class PackedWeight:
    """The weight of a layer as parts, one for each tensor of the checkpoint; their outputs follow each other."""

    def __init__(self, inputs: int, outputs: list[int], dtype: torch.dtype) -> None:
        self.inputs, self.outputs, self.dtype = inputs, outputs, dtype
        self.parts: list[Part | None] = [None] * len(outputs)
        self.is_shared = False
        self._fused: quantized.Fused | None = None
        self._products: list[Multiply] = []

    @property
    def numel(self) -> int:
        return self.inputs * sum(self.outputs)

    def finish(self) -> None:
        """All parts are there: one call multiplies by them if all are quantized, else one call for each."""
        parts = self._loaded()
        packed = [part for part in parts if isinstance(part, quantized.Packed)]
        if len(packed) == len(parts):
            self._fused = quantized.fuse(packed)
        else:
            self._products = [_product(part, self.is_shared) for part in parts]
            if not self.is_shared:
                self.parts = list(packed)  # what else there was is in the products

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._fused is not None:
            return quantized.linear(x, self._fused, bias)
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


def _product(part: Part, is_shared: bool) -> Multiply:
    if isinstance(part, quantized.Packed):
        fused = quantized.fuse([part])
        return lambda x, bias: quantized.linear(x, fused, bias)
    packed = None if is_shared else pack_weight(part)  # the other layer needs it as it is
    return packed or (lambda x, bias: F.linear(x, part, bias))


@dataclass(frozen=True)
class PackedSlot(LoadSlot):
    weight: PackedWeight | None = None
    index: int = 0
    target: str | None = None  # the format for a tensor that is not quantized; None: it stays as it is

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
        plain = torch.empty(self.view.shape, dtype=self.weight.dtype)
        yield plain
        self.weight.parts[self.index] = quantized.quantize(self.target, plain) if self.target else plain


class PackedLinearMethod(FusesFewRows):
    """GGUF's tensors stay as they are where their type has a kernel; with `target`, any tensor becomes that."""

    def __init__(self, target: str | None = None) -> None:
        self.target = target

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
        object.__setattr__(layer, "packed", PackedWeight(in_features, out_partition_sizes, dtype))

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        weight_of(owner).is_shared = True
        object.__setattr__(layer, "packed", weight_of(owner))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        weight = weight_of(layer)
        return {
            ("weight", p.shard): PackedSlot(
                torch.empty(p.size, weight.inputs, dtype=weight.dtype, device="meta"),
                p.full_shape, p.dim, p.start, weight=weight, index=index, target=self.target,
            )
            for index, p in enumerate(partitions)
        }  # fmt: skip

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed: PackedWeight = layer.packed  # type: ignore[assignment]
        return packed.multiply(x, bias)

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return weight_of(layer).lookup(ids)

    def process_after_loading(self, layer: nn.Module) -> None:
        weight_of(layer).finish()


def weight_of(layer: nn.Module) -> PackedWeight:
    weight = layer.packed
    assert isinstance(weight, PackedWeight)
    return weight


def packed_weights(model: nn.Module) -> list[PackedWeight]:
    """Each once, also where two layers share it."""
    found = (getattr(module, "packed", None) for module in model.modules())
    return list({id(weight): weight for weight in found if weight is not None}.values())


class GGUFQuantization:
    """The tensors of a GGUF file as they are stored, embedding and head included."""

    ignored: tuple[str, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear_method(self, module: str, names: tuple[str, ...]) -> PackedLinearMethod:
        return PackedLinearMethod()

    def vocab_method(self) -> PackedLinearMethod:
        return PackedLinearMethod()

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"gguf: weights stay quantized ({', '.join(quantized.FORMATS)}; other types become {compute}); activations "
            f"rounded to int8 in groups of {quantized.GROUP} for products, else {compute}"
        )


class IntQuantization:
    """Weights rounded to 8 or 4 bits while loading. The embedding and head, which are the same in many models, lose
    most by rounding and get 8 bits in both."""

    ignored: tuple[str, ...] = ()

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def linear_method(self, module: str, names: tuple[str, ...]) -> PackedLinearMethod:
        return PackedLinearMethod("Q8_0" if self.bits == 8 else "Q4_1")

    def vocab_method(self) -> PackedLinearMethod:
        return PackedLinearMethod("Q8_0")

    def describe(self) -> str:
        scales = "a scale" if self.bits == 8 else "a scale and a minimum"
        return (
            f"int{self.bits}: weights quantized while loading, {scales} per {quantized.GROUP} inputs; activations "
            f"rounded to int8; embedding and head in 8 bits"
        )
