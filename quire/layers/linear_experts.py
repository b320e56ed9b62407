"""Experts with the methods of linear layers, for weights that the kernels of mixtures do not multiply."""

import functools
import logging

import torch
from torch import nn

from quire.kernels.moe import Activation, RouterScoring, activate_torch, route_torch, sum_experts
from quire.layers.expert_terms import ExpertTerms
from quire.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import LinearMethod

logger = logging.getLogger("quire")

ExpertMethods = tuple[LinearMethod | None, LinearMethod | None]  # gate and up; down


class LinearExperts(nn.Module):
    """As FusedMoE, but each expert is two linear layers, each with its method, multiplied one expert at a time."""

    max_fused_rows = 0

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
        super().__init__()
        self.num_experts, self.top_k, self.tp = num_experts, top_k, tp
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.width = tp.share(intermediate_size, "the experts' intermediate size")
        self.terms: ExpertTerms | None = None  # of adapters
        self.renormalize, self.scoring, self.activation = renormalize, scoring, activation
        placed = (False, dtype, device, tp)
        self.gate_up = nn.ModuleList(
            MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, *placed, method) for method, _ in methods
        )
        self.down = nn.ModuleList(
            RowParallelLinear(intermediate_size, hidden_size, *placed, method) for _, method in methods
        )
        if device.type != "cpu":
            _warn_slow()

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """x [N, hidden], router_logits [N, experts] -> [N, hidden]."""
        weights, experts = route_torch(router_logits, self.top_k, renormalize=self.renormalize, scoring=self.scoring)
        return self.tp.all_reduce(sum_experts(x, weights, experts, self.num_experts, self._expert))

    def _expert(self, x: torch.Tensor, e: int, rows: torch.Tensor | None) -> torch.Tensor:
        """This worker's summand of one expert, [n, hidden] in float32."""
        down = self.down[e]
        assert isinstance(down, RowParallelLinear)
        terms = self.terms if self.terms is not None and self.terms.active else None
        gate_up = self.gate_up[e](x)
        if terms is not None:
            gate_up = terms.add_gate_up(gate_up, x, e, rows)
        inner = activate_torch(gate_up.float(), self.activation).to(x.dtype)
        output = down.method.apply(down, inner, None)
        if terms is not None:
            output = terms.add_down(output, inner, e, rows)
        return output.float()


@functools.cache
def _warn_slow() -> None:
    """Once for all layers."""
    logger.warning("quantized experts are multiplied one at a time on this device, which is slow")
