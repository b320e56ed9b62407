"""Linear layers with unquantized weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.invariant_linear import can_fuse, invariant_linear
from quire.kernels.lora import RowTerms
from quire.kernels.packed_linear import Multiply, Panels, pack_weight
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_linear import linear, prepare_skinny_linear
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition, VocabMethod, keep
from quire.quantization.fused_linear import FusedLinearMixin


@dataclass(frozen=True)
class UnquantizedLinearMethod(FusedLinearMixin):
    """A weight [out, in] in the compute dtype.

    On a CPU in bf16 it is packed once and the original freed (kernels/packed_linear.py). On a GPU few rows use our own
    kernels where these are faster than cuBLAS.
    """

    leaves_panels_only = True

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

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        layer.weight = owner.weight

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, layer.weight)  # type: ignore[arg-type]

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        assert isinstance(layer.weight, nn.Parameter)
        return {("weight", p.shard): weight_slot(layer.weight.data, p) for p in partitions}

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiply: Multiply | None = getattr(layer, "multiply", None)
        if multiply is not None:
            return multiply(x, bias)
        return linear(x, layer.weight, bias)  # type: ignore[arg-type]

    def process_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        prepare_skinny_linear(weight.device)
        multiply = pack_weight(weight.data)
        if multiply is not None:
            self._replace_weight(layer, multiply)

    def panels(self, layer: nn.Module) -> torch.Tensor | None:
        multiply: Multiply | None = getattr(layer, "multiply", None)
        assert multiply is None or isinstance(multiply, Panels)
        return None if multiply is None else multiply.data

    def load_panels(self, layer: nn.Module, data: torch.Tensor) -> None:
        assert isinstance(layer.weight, nn.Parameter)
        self._replace_weight(layer, Panels.of(data, layer.weight.shape))

    def _replace_weight(self, layer: nn.Module, multiply: Multiply) -> None:
        keep(layer, "multiply", multiply)
        del layer.weight


@dataclass(frozen=True)
class InvariantLinearMethod(UnquantizedLinearMethod):
    """A row's products are added in one order, whatever rows are multiplied with it, of which there may be any number
    in fused layers, too."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return invariant_linear(x, layer.weight, bias)  # type: ignore[arg-type]

    def can_fuse(self, layer: nn.Module) -> bool:
        return can_fuse(layer.weight)  # type: ignore[arg-type]

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
        terms: RowTerms | None = None,
    ) -> torch.Tensor:
        assert terms is None and isinstance(layer.weight, torch.Tensor)
        return invariant_linear(x, layer.weight, bias, norm=norm, residual=residual, silu=silu)


class Unquantized:
    """No linear layer is quantized."""

    ignored: tuple[str, ...] = ()

    def __init__(self, note: str = "") -> None:
        self.note = note

    def linear_method(self, name: str) -> LinearMethod | None:
        return None

    def vocab_method(self) -> VocabMethod | None:
        return None

    def describe(self) -> str:
        return self.note


UNQUANTIZED = Unquantized()


def weight_slot(weight: torch.Tensor, partition: Partition) -> LoadSlot:
    p = partition
    return LoadSlot(weight.narrow(0, p.offset, p.size), p.full_shape, p.dim, p.start)
