"""Experts with the methods of linear layers, for weights that the kernels of mixtures do not multiply."""

import functools
import logging

import torch
from torch import nn

from quire.kernels.int_linear import stack_experts
from quire.kernels.moe import Activation, RouterScoring
from quire.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from quire.layers.packed_experts import PackedExperts
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import LinearMethod, keep
from quire.quantization.int_triton import IntPart, packed_of

logger = logging.getLogger("quire")

ExpertMethods = tuple[LinearMethod | None, LinearMethod | None]  # gate and up; down


class LinearExperts(PackedExperts):
    """As FusedMoE, but each expert is two linear layers, each with its method, multiplied one expert at a time.

    Integers that are packed alike on a GPU become one weight after loading, for the kernels of mixtures.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        methods: list[ExpertMethods],  # of each expert
        tp: TensorParallel = SINGLE,
        *,
        renormalize: bool = True,
        scoring: RouterScoring = "softmax",
        activation: Activation = "silu",
    ) -> None:
        super().__init__(
            num_experts, top_k, hidden_size, intermediate_size, device, tp,
            renormalize=renormalize, scoring=scoring, activation=activation,
        )  # fmt: skip
        placed = (False, dtype, device, tp)
        self.gate_up = nn.ModuleList(
            MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, *placed, method) for method, _ in methods
        )
        self.down = nn.ModuleList(
            RowParallelLinear(intermediate_size, hidden_size, *placed, method) for _, method in methods
        )

    def process_after_loading(self) -> None:
        """After that of the experts' layers."""
        gate_up, down = (stack_experts([packed_of(e) for e in layers]) for layers in (self.gate_up, self.down))
        if gate_up is not None and down is not None and self.keep_packed(gate_up, down):
            for layers, stacked in ((self.gate_up, gate_up), (self.down, down)):
                for e, layer in enumerate(layers):
                    keep(layer, "int_parts", [IntPart(stacked.expert(e), None)])  # views: nothing is kept twice
        elif self.device.type != "cpu":
            _warn_slow()

    def multiply_gate_up(self, x: torch.Tensor, e: int) -> torch.Tensor:
        product: torch.Tensor = self.gate_up[e](x)
        return product

    def multiply_down(self, inner: torch.Tensor, e: int) -> torch.Tensor:
        down = self.down[e]
        assert isinstance(down, RowParallelLinear)
        return down.method.apply(down, inner, None)


@functools.cache
def _warn_slow() -> None:
    """Once for all layers."""
    logger.warning("quantized experts are multiplied one at a time on this device, which is slow")
