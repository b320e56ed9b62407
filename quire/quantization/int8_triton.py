"""W8A8 in int8 on a GPU: symmetric weights with a scale per output; rows quantized, each or by a fixed scale."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.quantize_fp8 import quantize_int8
from quire.kernels.scaled_linear import scaled_linear
from quire.kernels.scaled_table import BUCKETS
from quire.kernels.skinny_linear import config_for, prepare_skinny_linear, skinny_linear
from quire.quantization.base import keep
from quire.quantization.fused_linear import FusedLinearMixin
from quire.quantization.int_triton import TritonIntKernel
from quire.quantization.int_weight import IntWeight


@dataclass(frozen=True)
class W8A8Kernel(FusedLinearMixin):
    """`layer.weight` [N, K] int8, `layer.weight_scale` [N], `layer.input_scale` [1] or None.

    One or two rows are not quantized: reading the weight dominates there. Other weights are TritonIntKernel's.
    """

    dtype: torch.dtype

    def prepare(self, layer: nn.Module, weights: Iterable[IntWeight], module: str) -> None:
        members = [weight.in_group_order()[0] if weight.scales.shape[1] == 1 else weight for weight in weights]
        if not all(_fits(member) for member in members):
            keep(layer, "w8a16", TritonIntKernel(self.dtype))
            layer.w8a16.prepare(layer, members, module)  # type: ignore[operator, union-attr]
            return
        codes = torch.cat([member.codes for member in members])
        layer.weight = nn.Parameter((codes ^ 0x80).view(torch.int8), requires_grad=False)
        layer.register_buffer("weight_scale", torch.cat([member.scales[:, 0] for member in members]).float())
        fixed = [member.input_scale for member in members if member.input_scale is not None]
        if not all(0 < float(scale) < math.inf for scale in fixed):
            raise ValueError(f"{module}: its input_scale is {[float(s) for s in fixed]}; allowed: positive numbers")
        # A fused layer quantizes its input once, so the largest scale of its members is used.
        layer.register_buffer("input_scale", torch.cat(fixed).amax().view(1) if fixed else None)
        keep(layer, "kernel_row_counts", BUCKETS)
        prepare_skinny_linear(codes.device)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        other: TritonIntKernel | None = getattr(layer, "w8a16", None)
        if other is not None:
            return other.apply(layer, x, bias)
        weight, scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(scale, torch.Tensor)
        config = config_for(x, weight)
        if config is not None and config.kind == "gemv":
            return skinny_linear(x, weight, bias, config=config, weight_scale=scale)
        q, x_scale = quantize_int8(x, layer.input_scale)  # type: ignore[arg-type]
        if config is not None:
            return skinny_linear(q, weight, bias, config=config, weight_scale=scale, x_scale=x_scale, out_dtype=x.dtype)
        return scaled_linear(q, weight, x_scale, scale, bias, x.dtype)

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return f"int8 weights stay as stored; rows quantized to int8 where the checkpoint says so, else {compute}"


def _fits(weight: IntWeight) -> bool:
    plain = weight.bits == 8 and weight.zeros is None and weight.scales.shape[1] == 1 and weight.group_of is None
    return plain and weight.codes.shape[1] % 16 == 0
