"""RMSNorm and LayerNorm layers."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.layer_norm import LayerNormParams, fused_add_layer_norm, layer_norm
from quire.kernels.rms_norm import RMSNormParams, fused_add_rms_norm, rms_norm
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter


class Norm(Protocol):
    """Weights are float32 whatever the compute dtype: they are few, and `1 + weight` would lose bits in bf16."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum, which is the new residual: the old one may be overwritten."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    @property
    def params(self) -> RMSNormParams:
        """For kernels that fuse the norm."""
        return self.weight, self.eps

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {("weight", None): LoadSlot(self.weight.data, tuple(self.weight.shape), dummy="ones")}


class SharedRMSNorm(nn.Module):
    """Over a width that ranks share: [N, width of this rank], of which it has the weights from `start` on."""

    def __init__(self, size: int, full_size: int, start: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps, self.full_size, self.start = eps, full_size, start
        self.weight = new_parameter(size, dtype=torch.float32, device=device)

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 1] float32: this rank's mean of squares, to be averaged over ranks."""
        return x.float().pow(2).mean(dim=-1, keepdim=True)

    def scaled(self, x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """By the mean of squares [N, 1] of the whole width."""
        return (x.float() * torch.rsqrt(squares + self.eps) * self.weight).to(x.dtype)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {("weight", None): LoadSlot(self.weight.data, (self.full_size,), 0, self.start, "ones")}


class LayerNorm(nn.Module):
    """`shape` of more than one dimension: weights differ by head, and each head is normalised separately."""

    def __init__(
        self,
        shape: int | tuple[int, ...],
        eps: float,
        bias: bool,
        device: torch.device,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """`heads`: of how many these are a rank's, and which is its first."""
        super().__init__()
        self._heads = heads
        shape = (shape,) if isinstance(shape, int) else shape
        assert not bias or len(shape) == 1
        self.eps = eps
        self.weight = new_parameter(*shape, dtype=torch.float32, device=device)
        self.bias = new_parameter(*shape, dtype=torch.float32, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() > 1:
            return (F.layer_norm(x.float(), self.weight.shape[-1:], eps=self.eps) * self.weight).to(x.dtype)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.weight.dim() == 1
        return fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    @property
    def params(self) -> LayerNormParams:
        """For kernels that fuse the norm."""
        return self.weight, self.bias, self.eps

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        shape, start = tuple(self.weight.shape), 0
        if self._heads is not None:
            shape, start = (self._heads[0], *shape[1:]), self._heads[1]
        slots: dict[tuple[str, ShardId], LoadSlot] = {
            ("weight", None): LoadSlot(self.weight.data, shape, 0, start, "ones")
        }
        if self.bias is not None:
            slots["bias", None] = LoadSlot(self.bias.data, shape, dummy="zeros")
        return slots
