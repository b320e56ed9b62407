"""Experts with the methods of linear layers, for weights that the kernels of mixtures do not multiply."""

import functools
import logging

import torch
from torch import nn

from quire.kernels.dispatch import supports_triton
from quire.kernels.int_linear import PANEL, stack_experts
from quire.kernels.int_table import max_fused_rows as max_fused_rows_of_integers
from quire.kernels.moe import (
    Activation,
    Fp8ExpertWeights,
    IntExpertWeights,
    RouterScoring,
    activate_torch,
    fused_layer,
    moe_triton,
    prepare_moe,
    route_torch,
    sum_experts,
)
from quire.kernels.moe_table import MAX_EXPERTS, max_fused_rows
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.expert_terms import ExpertTerms
from quire.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import LinearMethod, keep
from quire.quantization.fp8_experts import quantizes_rows, stack_fp8_experts
from quire.quantization.int_triton import IntPart, packed_of

logger = logging.getLogger("quire")

ExpertMethods = tuple[LinearMethod | None, LinearMethod | None]  # gate and up; down


class LinearExperts(nn.Module):
    """As FusedMoE, but each expert is two linear layers, each with its method, multiplied one expert at a time.

    Those that are quantized alike on a GPU become one weight after loading, for the kernels of mixtures.
    """

    packed: IntExpertWeights | Fp8ExpertWeights | None = None

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
        self.device = device

    def process_after_loading(self) -> None:
        """After that of the experts' layers."""
        can_sort = self.num_experts <= MAX_EXPERTS and self.width % PANEL == 0 and supports_triton(self.device)
        packed = self._stacked_integers() or self._stacked_fp8() if can_sort else None
        if packed is not None:
            prepare_moe(self.device)
            keep(self, "packed", packed)
        elif self.device.type != "cpu":
            _warn_slow()

    def _stacked_integers(self) -> IntExpertWeights | None:
        gate_up, down = (stack_experts([packed_of(e) for e in layers]) for layers in (self.gate_up, self.down))
        if gate_up is None or down is None:
            return None
        for layers, stacked in ((self.gate_up, gate_up), (self.down, down)):
            for e, layer in enumerate(layers):
                keep(layer, "int_parts", [IntPart(stacked.expert(e), None)])  # views: nothing is kept twice
        return IntExpertWeights(gate_up, down, activation=self.activation)

    def _stacked_fp8(self) -> Fp8ExpertWeights | None:
        gate_up, down = stack_fp8_experts(self.gate_up), stack_fp8_experts(self.down)
        if gate_up is None or down is None:
            return None
        return Fp8ExpertWeights(gate_up, down, quantizes_rows(self.gate_up[0]), self.activation)

    @property
    def max_fused_rows(self) -> int:
        if self.packed is None or self.tp.size > 1:
            return 0
        shape = self.packed.shape(self.top_k)
        if isinstance(self.packed, Fp8ExpertWeights):
            return max_fused_rows(shape)
        return max_fused_rows_of_integers(self.packed.gate_up.bits, shape)

    def forward_fused(
        self,
        stream: torch.Tensor,
        norm: RMSNormParams,
        router_weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        router_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, router, experts, and the sum with the residual, for at most `max_fused_rows` rows on a GPU."""
        assert self.packed is not None
        kind = {"renormalize": self.renormalize, "scoring": self.scoring}
        return fused_layer(
            stream,
            norm,
            router_weight,
            router_bias,
            self.packed,
            self.top_k,
            residual=residual,
            **kind,  # type: ignore[arg-type]
        )

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """x [N, hidden], router_logits [N, experts] -> [N, hidden]."""
        if self.packed is not None and not (self.terms is not None and self.terms.active):
            kind = {"renormalize": self.renormalize, "scoring": self.scoring}
            return self.tp.all_reduce(moe_triton(x, router_logits, self.packed, self.top_k, **kind))  # type: ignore[arg-type]
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
