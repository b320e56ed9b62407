"""Linear layers of few rows fused with norm, activation and residual on a GPU."""

import torch
from torch import nn

from quire.kernels.lora import RowTerms
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_linear import can_fuse, fused_config_for, skinny_linear
from quire.kernels.skinny_table import for_groups


class FusedLinearMixin:
    """The fused part of a LinearMethod, for at most MAX_FUSED_ROWS rows on a GPU, if the layer's state is `weight` and
    perhaps `weight_scale` and `scale_groups`."""

    def can_fuse(self, layer: nn.Module) -> bool:
        weight = getattr(layer, "weight", None)
        return weight is not None and can_fuse(weight)

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
        """`terms`: of adapters, added to the product."""
        weight, scale = layer.weight, getattr(layer, "weight_scale", None)
        assert isinstance(weight, torch.Tensor)
        config, groups = fused_config_for(len(x), weight), getattr(layer, "scale_groups", None)
        if groups is not None:
            config = for_groups(config, groups)
        return skinny_linear(
            x, weight, bias, config=config, weight_scale=scale, norm=norm, residual=residual, silu=silu,
            groups=groups, terms=terms,
        )  # fmt: skip
