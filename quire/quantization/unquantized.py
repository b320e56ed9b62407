import torch
from torch import nn

from quire.kernels.skinny_linear import (
    Norm,
    can_fuse,
    fused_config_for,
    linear,
    prepare_skinny_linear,
    skinny_linear,
)
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition


class UnquantizedLinearMethod:
    """A plain weight [out, in] in the compute dtype.

    On a CPU in bf16 it is packed once into oneDNN's blocked layout: measured twice as fast at one row and 10 to 30%
    faster at 64 than leaving oneDNN to reorder the weight in every call. The original is then dropped. On a GPU few
    rows take our own kernels where those are faster than cuBLAS.
    """

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        weight = torch.empty(sum(out_partition_sizes), in_features, dtype=dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        assert isinstance(layer.weight, nn.Parameter)
        return {("weight", p.shard): weight_slot(layer.weight.data, p) for p in partitions}

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = getattr(layer, "packed_weight", None)
        if packed is None:
            return linear(x, layer.weight, bias)  # type: ignore[arg-type]
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def can_fuse(self, layer: nn.Module) -> bool:
        weight = getattr(layer, "weight", None)
        return weight is not None and can_fuse(weight)

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        config = fused_config_for(len(x), weight)
        return skinny_linear(x, weight, bias, config=config, norm=norm, residual=residual, silu=silu)

    def process_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        prepare_skinny_linear(weight.device)
        if can_pack(weight):
            layer.packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
            del layer.weight


class Unquantized:
    """Every linear layer has a plain weight."""

    ignored: tuple[str, ...] = ()

    def linear_method(self, module: str, names: tuple[str, ...]) -> LinearMethod | None:
        return None

    def describe(self) -> str:
        return ""


UNQUANTIZED = Unquantized()


def weight_slot(weight: torch.Tensor, partition: Partition) -> LoadSlot:
    p = partition
    return LoadSlot(weight.narrow(0, p.offset, p.size), p.full_shape, p.dim, p.start)


def can_pack(weight: torch.Tensor) -> bool:
    on_cpu_in_bf16 = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
    return on_cpu_in_bf16 and torch.backends.mkldnn.is_available() and _has_packing_ops()


def _has_packing_ops() -> bool:
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
