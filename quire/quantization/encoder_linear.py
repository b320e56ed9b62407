"""Linear layers of encoders: on a CPU packed in float32 too, and in one pass with what follows them."""

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.activation import activate, kernel_number
from quire.kernels.layer_norm import LayerNormParams, fused_add_layer_norm
from quire.kernels.native import encoder as native
from quire.kernels.native import has_amx
from quire.quantization.base import keep
from quire.quantization.unquantized import UnquantizedLinearMethod


@dataclass(frozen=True)
class EncoderPanels:
    """A weight [N, K] packed for the encoders' kernels, and the product with it."""

    data: torch.Tensor
    num_outputs: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return native.linear(x, self.data, self.num_outputs, bias)

    def activated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return native.linear(x, self.data, self.num_outputs, bias, kernel_number(activation))

    def normed_sum(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm: LayerNormParams
    ) -> torch.Tensor:
        return native.linear(x, self.data, self.num_outputs, bias, residual=residual, norm=norm)


@dataclass(frozen=True)
class EncoderLinearMethod(UnquantizedLinearMethod):
    leaves_panels_only = False

    def process_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        if not native.serves_encoders(weight) or (has_amx() and weight.dtype is torch.bfloat16):
            super().process_after_loading(layer)
            return
        keep(layer, "multiply", EncoderPanels(native.pack(weight.data), weight.shape[0]))
        del layer.weight

    def apply_activated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """activation(apply(x))"""
        multiply = getattr(layer, "multiply", None)
        if isinstance(multiply, EncoderPanels):
            return multiply.activated(x, bias, activation)
        return activate(self.apply(layer, x, bias), activation)

    def apply_normed_sum(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: LayerNormParams,
    ) -> torch.Tensor:
        """norm(residual + apply(x)); `residual` may be overwritten."""
        multiply = getattr(layer, "multiply", None)
        if isinstance(multiply, EncoderPanels):
            return multiply.normed_sum(x, bias, residual, norm)
        return fused_add_layer_norm(self.apply(layer, x, bias), residual, *norm)[0]
