"""The interface between a linear layer and its quantization method."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from quire.kernels.rms_norm import RMSNormParams
from quire.layers.load_slot import LoadSlot, ShardId


@dataclass(frozen=True)
class Partition:
    """Outputs of a linear layer stored as one tensor in the checkpoint, and the part of it that this worker holds."""

    shard: ShardId
    offset: int  # first row in the layer's weight
    size: int  # number of rows there
    full_shape: tuple[int, int]  # of the checkpoint's weight
    dim: int  # split among workers along this dimension
    start: int  # of this worker's part


class LinearMethod(Protocol):
    """How a linear layer stores its weight and multiplies by it.

    A method is a value, a frozen dataclass: equal methods are one scheme, and one method may serve any number of
    layers. All state is on the layer that it is given: tensors as parameters (those that are loaded) and buffers, set
    as usual; anything else (packed weights, what is needed only while loading) with `keep`. A linear layer, a member of
    a fused layer (mixed.py) and an expert (layers/linear_experts.py) are such layers alike.
    """

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register the parameters on `layer`; the partitions of a fused layer are concatenated."""
        ...

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        """Where the checkpoint's tensors go, by (name in the checkpoint's layer, shard); the bias is not among them."""
        ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [N, in_features] -> [N, sum of the partitions]."""
        ...

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """`apply` with RMSNorm of x before it, SiLU-mul (outputs are [gate; up]) and a residual sum after it, in one
        kernel, for at most MAX_FUSED_ROWS rows."""
        ...

    def can_fuse(self, layer: nn.Module) -> bool:
        """Whether apply_fused() supports the layer; call it once weights are loaded."""
        ...

    def process_after_loading(self, layer: nn.Module) -> None:
        """Convert the weight to its fastest form for inference."""
        ...


def keep(layer: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a layer that is no parameter, buffer or module of it, whatever its type."""
    object.__setattr__(layer, name, value)


@runtime_checkable
class HasPanels(Protocol):
    """A LinearMethod whose packed weights can be cached in a file (models/loading/packed_cache.py)."""

    def panels(self, layer: nn.Module) -> torch.Tensor | None:
        """The packed weight (kernels/packed_linear.py); None if it is not packed."""
        ...

    def load_panels(self, layer: nn.Module, data: torch.Tensor) -> None:
        """Set the packed weight, instead of loading the weight and process_after_loading."""
        ...


class GatedLinearMethod:
    """Base of a LinearMethod that does something better with an activation of gate and up than `apply` before it. No
    protocol: a step asks in every layer, and that takes microseconds."""

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """activation(gate) * up: outputs are [gate; up]."""
        raise NotImplementedError


@runtime_checkable
class CanDequantize(Protocol):
    """A LinearMethod whose weights can be had unquantized, for experts that are not all packed alike."""

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """[outputs, inputs] in the compute dtype, once weights are loaded."""
        ...


class VocabMethod(LinearMethod, Protocol):
    """For the embedding too, whose weight the head may share."""

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        """Instead of create_weights: share another layer's weight."""
        ...

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ids [N] -> [N, in_features]."""
        ...


class Quantization(Protocol):
    """How a model's weights are stored: selects the method of each linear layer."""

    ignored: tuple[str, ...]  # patterns of checkpoint tensors that this method does not need

    def linear_method(self, name: str) -> LinearMethod | None:
        """For a linear layer as named in the checkpoint; None: not quantized. Those fused into one may differ."""
        ...

    def vocab_method(self) -> VocabMethod | None:
        """For the embedding and an untied head; None: not quantized."""
        ...

    def describe(self) -> str:
        """For the log; empty if weights are not quantized."""
        ...


@runtime_checkable
class QuantizesHead(Protocol):
    """A Quantization with another method for an untied head than for the embedding."""

    def head_method(self) -> LinearMethod | None:
        """None: not quantized."""
        ...


@runtime_checkable
class StoresFusedExperts(Protocol):
    """A Quantization with a layer of its own for experts that the checkpoint has in one tensor."""

    def fused_experts(self) -> Callable[..., Any]:
        """Constructed as FusedMoE is, whose methods it has."""
        ...


@runtime_checkable
class RegroupsTensors(Protocol):
    """A Quantization whose checkpoints store a weight in other tensors than its methods load."""

    def regroup(self, tensors: Iterable[Any]) -> Iterator[Any]:
        """The checkpoint's tensors (name, shape, read_into) as those of the methods."""
        ...
