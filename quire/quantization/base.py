from typing import Protocol

import torch
from torch import nn


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

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [N, in_features] -> [N, sum of the partitions]."""
        ...

    def process_after_loading(self, layer: nn.Module) -> None:
        """Turn the weight into the form that is fastest to multiply by."""
        ...
