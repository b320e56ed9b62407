"""Linear layers of 4-bit floats whose activations are rounded alike (W4A4)."""

from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.moe import InputRounding
from quire.kernels.round_fp4 import round_mxfp4, round_nvfp4
from quire.quantization.base import LinearMethod, keep
from quire.quantization.fp4 import Fp4Scheme
from quire.quantization.int_kernels import IntKernel
from quire.quantization.int_linear import IntLinearMethod, StoredPart


@dataclass(frozen=True)
class RoundedInputsMethod(IntLinearMethod):
    """Emulates W4A4: inputs are rounded to 4-bit floats, then multiplied as they are for W4A16. A scale of the inputs
    is part of the weight's. `layer.input_scales`: the outputs of each scale, for members that differ in it."""

    def process_after_loading(self, layer: nn.Module) -> None:
        parts: list[StoredPart] = layer.stored_parts  # type: ignore[assignment]
        found: list[tuple[float | None, int]] = []
        for part in parts:
            scale = self._scale(part)
            if found and found[-1][0] == scale:
                found[-1] = (scale, found[-1][1] + part.partition.size)
            else:
                found.append((scale, part.partition.size))
        keep(layer, "input_scales", found)
        super().process_after_loading(layer)

    def _scale(self, part: StoredPart) -> float | None:
        assert isinstance(self.scheme, Fp4Scheme)
        inputs, group = part.local_inputs, self.scheme.group_size
        if inputs % group:
            raise ValueError(f"{self.module} has {inputs} inputs on a worker, no multiple of its groups of {group}")
        if self.scheme.global_scale is None:
            return None
        try:
            return self.scheme.inputs_times(part.views)
        except ValueError as error:
            raise ValueError(f"{self.module}: {error}") from error

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scales: list[tuple[float | None, int]] = layer.input_scales  # type: ignore[assignment]
        if len(scales) == 1:
            return self.kernel.apply(layer, _rounded(x, scales[0][0]), bias)
        products, first = [], 0
        for scale, outputs in scales:
            # All outputs for those of one scale: members are calibrated by the same inputs, so this is rare.
            products.append(self.kernel.apply(layer, _rounded(x, scale), bias)[:, first : first + outputs])
            first += outputs
        return torch.cat(products, dim=1)

    def can_fuse(self, layer: nn.Module) -> bool:
        return False

    def apply_fused(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError("inputs are rounded before the product")


def _rounded(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    return round_mxfp4(x) if scale is None else round_nvfp4(x, scale)


def input_rounding(gate_up: list[nn.Module], down: list[nn.Module]) -> tuple[bool, InputRounding | None]:
    """Whether the kernels of mixtures can round as the experts' layers do, and how; None: not at all."""
    scales = [[getattr(layer, "input_scales", None) for layer in layers] for layers in (gate_up, down)]
    found = [one for layers in scales for one in layers]
    if not any(found):
        return True, None
    if not all(one is not None and len(one) == 1 for one in found):
        return False, None  # some are not rounded, or gate and up differ
    numbers = [[one[0][0] for one in layers] for layers in scales]  # type: ignore[index]
    if all(number is None for layers in numbers for number in layers):
        return True, InputRounding()
    if any(number is None for layers in numbers for number in layers):
        return False, None
    device = gate_up[0].stored_on
    return True, InputRounding(*(torch.tensor(layers, device=device) for layers in numbers))  # type: ignore[arg-type]


def fp4_linear_method(scheme: Fp4Scheme, kernel: IntKernel, module: str) -> LinearMethod:
    return (RoundedInputsMethod if scheme.rounds_inputs else IntLinearMethod)(scheme, kernel, module)
