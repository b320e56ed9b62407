"""What a quantization method is to a linear layer."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from quire.kernels.rms_norm import RMSNormParams
from quire.layers.load_slot import LoadSlot, ShardId


@dataclass(frozen=True)
class Partition:
    """The outputs of a linear layer that are one tensor in the checkpoint, and the part of it this worker holds."""

    shard: ShardId
    offset: int  # first row in the layer's weight
    size: int  # rows there
    full_shape: tuple[int, int]  # of the checkpoint's weight
    dim: int  # split among workers along this dimension,
    start: int  # this worker's part beginning here


class LinearMethod(Protocol):
    """How a linear layer stores its weight and multiplies by it."""

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Register the parameters on `layer`; a fused layer's outputs lie one partition after the other."""
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
        """The same with RMSNorm of x before, SiLU-mul (outputs are [gate; up]) and a sum after, in one kernel, for at
        most MAX_FUSED_ROWS rows."""
        ...

    def can_fuse(self, layer: nn.Module) -> bool:
        """Whether apply_fused() works for the layer, once it is loaded."""
        ...

    def process_after_loading(self, layer: nn.Module) -> None:
        """Turn the weight into the form that is fastest to multiply by."""
        ...


@runtime_checkable
class HasPanels(Protocol):
    """A LinearMethod whose layers can be kept packed in a file (models/loading/packed_cache.py)."""

    def panels(self, layer: nn.Module) -> torch.Tensor | None:
        """What the weight has become, if it has."""
        ...

    def take_panels(self, layer: nn.Module, data: torch.Tensor) -> None:
        """Instead of loading the weight and process_after_loading."""
        ...


class VocabMethod(LinearMethod, Protocol):
    """Also for the embedding, whose weight may be the head's."""

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        """Instead of create_weights: the same weight as another layer's."""
        ...

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ids [N] -> [N, in_features]."""
        ...


class Quantization(Protocol):
    """How a model's weights are stored: gives each linear layer its method."""

    ignored: tuple[str, ...]  # patterns of tensors in the checkpoint that this method has no use for

    def linear_method(self, module: str, names: tuple[str, ...]) -> LinearMethod | None:
        """For the layer made of `names` of `module`, as the checkpoint calls them; None: it is not quantized."""
        ...

    def vocab_method(self) -> VocabMethod | None:
        """For the embedding, and for a head of its own; None: neither is quantized."""
        ...

    def describe(self) -> str:
        """For the log: what is done to the weights. Empty: nothing."""
        ...
