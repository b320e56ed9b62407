"""Linear layers in fp8 whose weights have a scale per block, or whose activations are not quantized (W8A16)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.quantize_fp8 import quantize_fp8
from quire.kernels.scaled_linear import dequantize_fp8, has_library_blocks, scaled_linear
from quire.kernels.scaled_table import BUCKETS
from quire.kernels.skinny_linear import Groups, config_for, skinny_linear
from quire.kernels.skinny_table import for_groups
from quire.quantization.base import keep
from quire.quantization.fp8_linear import CheckpointFp8LinearMethod
from quire.quantization.fp8_scales import scales_of


@dataclass(frozen=True)
class GroupedFp8LinearMethod(CheckpointFp8LinearMethod):
    """`layer.weight` [N, K] fp8; `layer.weight_scale` [N / n, K / k], `layer.scale_groups` (n, k); or [N] and None.

    Rows are quantized in groups of k inputs. As with a scale per output, one or two rows are not, and none are where
    the checkpoint says so: then the weight of many rows is dequantized for the library.
    """

    def process_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer.weight, nn.Parameter)
        if self.scheme.block is None:
            keep(layer, "scale_groups", None)
            super().process_after_loading(layer)
            return
        scales, weight = scales_of(layer), layer.weight.data
        scales.check(self.module)
        groups = scales.groups(self.module, weight.shape[1])
        keep(layer, "scale_groups", groups)
        self.set_weight(layer, weight, scales.by_group(groups, weight.shape[1]))
        del layer.checkpoint_scales
        if self.scheme.activations != "none":
            keep(layer, "kernel_row_counts", BUCKETS)
            has_library_blocks(weight.device)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(scale, torch.Tensor)
        groups: Groups | None = layer.scale_groups  # type: ignore[assignment]
        config, quantizes = config_for(x, weight), self.scheme.activations != "none"
        if config is not None and groups is not None:
            config = for_groups(config, groups)
        if config is not None and (config.kind == "gemv" or not quantizes):
            return skinny_linear(x, weight, bias, config=config, weight_scale=scale, groups=groups)
        if not quantizes:
            return F.linear(x, dequantize_fp8(weight, scale, groups, x.dtype), bias)
        assert groups is not None
        q, x_scale = quantize_fp8(x, group=groups[1])
        if config is not None:
            return skinny_linear(
                q, weight, bias, config=config, weight_scale=scale, x_scale=x_scale, out_dtype=x.dtype, groups=groups
            )
        return scaled_linear(q, weight, x_scale, scale, bias, x.dtype, groups)
