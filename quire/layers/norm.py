import torch
from torch import nn

from quire.kernels.rms_norm import fused_add_rms_norm, rms_norm
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum: the new residual."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    @property
    def for_fusing(self) -> tuple[torch.Tensor, float]:
        return self.weight, self.eps

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {("weight", None): LoadSlot(self.weight.data, tuple(self.weight.shape), dummy="ones")}
