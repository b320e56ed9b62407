"""How integer weights are kept and multiplied: panels on a CPU, packed on a GPU, else dequantized."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from quire.kernels.int_linear import HALF
from quire.kernels.native import quantized
from quire.kernels.rms_norm import RMSNormParams
from quire.quantization.block_quantized import BlockQuantizedWeight, panels_obstacle, weight_of
from quire.quantization.int8_triton import W8A8Kernel
from quire.quantization.int_panels import pack_int_weight
from quire.quantization.int_triton import TritonIntKernel
from quire.quantization.int_weight import IntWeight
from quire.quantization.unquantized import UnquantizedLinearMethod

logger = logging.getLogger("quire")


class IntKernel(Protocol):
    """A platform's products with integer weights: a value, a frozen dataclass, whose state is on the layer."""

    def prepare(self, layer: nn.Module, weights: Iterable[IntWeight], module: str) -> None:
        """Keep the weights of a layer's partitions, decoded one at a time, in the form that `apply` needs.
        `layer.block_weight` has its sizes and dtype."""
        ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [N, inputs] -> [N, outputs of all partitions]."""
        ...

    def can_fuse(self, layer: nn.Module) -> bool: ...

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """See LinearMethod."""
        ...

    def describe(self) -> str:
        """For the log."""
        ...


class MultipliesByKernel:
    """The products of a LinearMethod, made by its `kernel`."""

    kernel: IntKernel

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.kernel.apply(layer, x, bias)

    def can_fuse(self, layer: nn.Module) -> bool:
        return self.kernel.can_fuse(layer)

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        return self.kernel.apply_fused(layer, x, bias, norm, residual, silu)


def choose_int_kernel(
    dtype: torch.dtype,
    device: torch.device,
    dequantize: bool,
    int8_inputs: bool = False,
    group_size: int = quantized.GROUP,
) -> IntKernel:
    """The one place that knows which platform multiplies integer weights in which way. int8_inputs: the checkpoint is
    made for activations in int8. group_size: of all its weights, for formats that fix it."""
    if device.type == "cuda" and dtype in HALF and not dequantize:
        return W8A8Kernel(dtype) if int8_inputs else TritonIntKernel(dtype)
    compute = str(dtype).removeprefix("torch.")
    obstacle = "as requested" if dequantize else panels_obstacle(dtype, device)
    if obstacle is None and not quantized.is_fast():
        obstacle = "this processor has no instructions for quantized products"
    if obstacle is None and group_size % quantized.GROUP:
        obstacle = f"a CPU multiplies as stored by groups of {quantized.GROUP}"
    return PanelKernel(compute) if obstacle is None else DequantizedKernel(compute, obstacle)


@dataclass(frozen=True)
class PanelKernel:
    """A CPU's panels (kernels/native/quantized.h). What these cannot hold is dequantized, and the log says so."""

    compute: str
    logged: set[str] = field(default_factory=set, compare=False)  # reasons, each once for a model

    def prepare(self, layer: nn.Module, weights: Iterable[IntWeight], module: str) -> None:
        block = weight_of(layer)
        for i, weight in enumerate(weights):
            packed = pack_int_weight(weight, exact=block.dtype is torch.float32)
            if isinstance(packed, str):
                self._log_dequantized(module, packed)
                block.parts[i] = torch.empty(weight.codes.shape, dtype=block.dtype)
                weight.dequantize_into(block.parts[i])  # type: ignore[arg-type]
            else:
                block.parts[i], block.orders[i] = packed
        block.finish()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: BlockQuantizedWeight = layer.block_weight  # type: ignore[assignment]
        return weight.multiply(x, bias)

    def can_fuse(self, layer: nn.Module) -> bool:
        return False

    def apply_fused(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError("fused layers are for GPUs")

    def describe(self) -> str:
        return (
            f"weights are integers; activations rounded to int8 in groups of {quantized.GROUP} for products, else "
            f"{self.compute}"
        )

    def _log_dequantized(self, module: str, why: str) -> None:
        if why not in self.logged:
            self.logged.add(why)
            logger.warning("%s, perhaps with others, is dequantized to %s: %s", module, self.compute, why)


@dataclass(frozen=True)
class DequantizedKernel(UnquantizedLinearMethod):
    """Weights become the compute dtype after loading, layer by layer; from then on they are unquantized."""

    compute: str
    why: str

    def prepare(self, layer: nn.Module, weights: Iterable[IntWeight], module: str) -> None:
        block = weight_of(layer)
        outputs, device = sum(block.outputs), layer.stored_on
        whole = torch.empty(outputs, block.inputs, dtype=block.dtype, device=device)  # type: ignore[call-overload]
        for weight, rows in zip(weights, whole.split(block.outputs), strict=True):
            weight.dequantize_into(rows)
        del layer.block_weight
        layer.weight = nn.Parameter(whole, requires_grad=False)
        self.process_after_loading(layer)

    def describe(self) -> str:
        return f"weights dequantized to {self.compute} while loading ({self.why})"
