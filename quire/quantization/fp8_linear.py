"""Linear layers in fp8 (e4m3) with a scale per output and row: y = (q_x * scale_x) (q_w * scale_w)^T."""

from dataclasses import dataclass, field

import torch
from torch import nn

from quire.kernels.quantize_fp8 import FP8, FP8_MAX, SMALLEST_MAX, quantize_fp8
from quire.kernels.skinny_linear import (
    config_for,
    prepare_skinny_linear,
    skinny_linear,
    skinny_linear_torch,
)
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import Partition, keep
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.fp8_scales import CheckpointScales, scales_of
from quire.quantization.fused_linear import FusedLinearMixin
from quire.quantization.staging import Staging
from quire.quantization.unquantized import weight_slot


@dataclass(frozen=True)
class Fp8LinearMethod(FusedLinearMixin):
    """fp8 products. `layer.weight` [N, K] fp8, `layer.weight_scale` [N], `layer.input_scale` [1] or None.

    One scale per output and per token serves every kind of checkpoint: coarser scales are repeated. One or two rows are
    not quantized: reading the weight dominates there, so fp8 activations would gain nothing.
    """

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        config = config_for(x, layer.weight)  # type: ignore[arg-type]
        if config is not None and config.kind == "gemv":
            return skinny_linear(x, layer.weight, bias, config=config, weight_scale=layer.weight_scale)  # type: ignore[arg-type]
        q, scale = quantize_fp8(x, layer.input_scale)  # type: ignore[arg-type]
        return self.apply_quantized(layer, q, scale, bias, x.dtype)

    def apply_quantized(
        self, layer: nn.Module, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """q [M, K] fp8, scale [M]: from `quantize_fp8`, `rms_norm_quant` or `silu_mul_quant`."""
        weight, weight_scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(weight_scale, torch.Tensor)
        if not q.is_cuda:
            return skinny_linear_torch(q, weight, bias, weight_scale=weight_scale, x_scale=scale, out_dtype=dtype)
        config = config_for(q, weight)
        if config is not None:
            return skinny_linear(
                q, weight, bias, config=config, weight_scale=weight_scale, x_scale=scale, out_dtype=dtype
            )
        y = torch._scaled_mm(
            q,
            weight.t(),
            scale_a=scale[:, None],
            scale_b=weight_scale[None, :],
            out_dtype=torch.bfloat16,  # the only output type with row-wise scales
            use_fast_accum=True,
        ).to(dtype)
        return y if bias is None else y.add_(bias)

    def set_weight(self, layer: nn.Module, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_buffer("weight_scale", weight_scale)
        prepare_skinny_linear(weight.device)


@dataclass(frozen=True)
class OnlineFp8LinearMethod(Fp8LinearMethod):
    """Quantizes an unquantized checkpoint layer by layer while loading: the model is never in memory unquantized."""

    per_channel: bool

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_size(in_features, sum(out_partition_sizes))
        layer.register_buffer("input_scale", None)
        keep(layer, "staged", ((sum(out_partition_sizes), in_features), dtype, device))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        def finish(weight: torch.Tensor) -> None:
            scale = None
            if not self.per_channel:
                scale = (weight.abs().amax().float().clamp(min=SMALLEST_MAX) * (1.0 / FP8_MAX)).view(1)
            self.set_weight(layer, *quantize_fp8(weight, scale))

        shape, dtype, device = layer.staged  # type: ignore[misc]
        return Staging(shape, dtype, device, len(partitions), finish).slots(partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer.weight, nn.Parameter), "not all parts of the weight were loaded"


@dataclass(frozen=True)
class CheckpointFp8LinearMethod(Fp8LinearMethod):
    """fp8 weights and scales from the checkpoint."""

    scheme: Fp8Scheme
    module: str = field(default="a linear layer", compare=False)  # for messages; of a fused layer, one of them

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        outputs = sum(out_partition_sizes)
        check_size(in_features, outputs, self.module)
        layer.weight = nn.Parameter(torch.empty(outputs, in_features, dtype=FP8, device=device), requires_grad=False)
        keep(layer, "checkpoint_scales", CheckpointScales(self.scheme, device))

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        assert isinstance(layer.weight, nn.Parameter)
        slots = {("weight", p.shard): weight_slot(layer.weight.data, p) for p in partitions}
        return slots | scales_of(layer).slots(partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer.weight, nn.Parameter)
        scales = scales_of(layer)
        scales.check(self.module)
        self.set_weight(layer, layer.weight.data, scales.by_output())
        layer.register_buffer("input_scale", scales.of_inputs())
        del layer.checkpoint_scales


def check_size(in_features: int, out_features: int, module: str = "one") -> None:
    if in_features % 16 or out_features % 16:
        raise ValueError(
            f"fp8 needs layers whose inputs and outputs are multiples of 16; {module} has {in_features} and "
            f"{out_features}"
        )
