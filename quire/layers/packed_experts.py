"""Experts in 4 or 8 bits: the kernels of mixtures where all are packed alike, else one expert at a time."""

import torch
from torch import nn

from quire.kernels import moe_table
from quire.kernels.dispatch import supports_triton
from quire.kernels.int_linear import PANEL, PackedIntWeight
from quire.kernels.int_table import max_fused_rows
from quire.kernels.moe import (
    Activation,
    AnyExpertWeights,
    ExpertWeights,
    Fp8ExpertWeights,
    InputRounding,
    IntExpertWeights,
    activate_torch,
    fused_layer,
    moe_triton,
    prepare_moe,
    sum_experts,
)
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.moe_table import MAX_EXPERTS
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.expert_terms import ExpertTerms
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import keep


class PackedExperts(nn.Module):
    """What FusedMoE is for unquantized experts; a subclass stores and loads them and multiplies by a single one."""

    packed: AnyExpertWeights | None = None

    def __init__(
        self,
        num_experts: int,
        routing: Routing,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        *,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        routing.check(num_experts)
        self.num_experts, self.routing, self.tp, self.device = num_experts, routing, tp, device
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.width = tp.share(intermediate_size, "the experts' intermediate size")
        self.terms: ExpertTerms | None = None  # of adapters
        self.activation = activation

    def multiply_gate_up(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """By one expert, with its bias: [N, hidden] -> [N, 2 * width], gate before up."""
        raise NotImplementedError

    def multiply_down(self, inner: torch.Tensor, e: int) -> torch.Tensor:
        """[N, width] -> [N, hidden]: this worker's summand."""
        raise NotImplementedError

    def keep_packed(
        self,
        gate_up: PackedIntWeight,
        down: PackedIntWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        rounding: InputRounding | None = None,
    ) -> bool:
        """For the kernels of mixtures; whether these can multiply by them."""
        if not self.can_sort or self.width % PANEL:
            return False
        prepare_moe(self.device)
        keep(self, "packed", IntExpertWeights(gate_up, down, gate_up_bias, down_bias, self.activation, rounding))
        return True

    def keep_dense(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Unquantized ones, for the same kernels."""
        prepare_moe(self.device)
        keep(self, "packed", ExpertWeights(gate_up, down, gate_up_bias, down_bias, self.activation))

    def keep_fp8(self, weights: Fp8ExpertWeights) -> None:
        prepare_moe(self.device)
        keep(self, "packed", weights)

    @property
    def has_shared(self) -> bool:
        """Whether shared experts are among these."""
        return self.routing.shared > 0

    @property
    def can_sort(self) -> bool:
        """Whether there are kernels of mixtures for so many experts here."""
        return self.num_experts <= MAX_EXPERTS and supports_triton(self.device)

    @property
    def max_fused_rows(self) -> int:
        if self.packed is None:
            return 0
        shape = self.packed.shape(self.routing.slots)
        if isinstance(self.packed, ExpertWeights | Fp8ExpertWeights):
            return moe_table.max_fused_rows(shape)
        return max_fused_rows(self.packed.gate_up.bits, shape) if self.packed.rounding is None else 0

    def forward_fused(
        self,
        stream: torch.Tensor,
        norm: RMSNormParams,
        router_weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        router_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, router, experts, and the sum with the residual, for at most `max_fused_rows` rows on a GPU."""
        assert self.packed is not None
        out = fused_layer(
            stream,
            norm,
            router_weight,
            router_bias,
            self.packed,
            self.routing,
            correction_bias,
            residual=residual if self.tp.rank == 0 else None,  # once in the sum
        )
        return self.tp.all_reduce(out)

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, hidden], router_logits [N, experts], bias of their choice [experts] -> [N, hidden]."""
        if self.packed is not None and not (self.terms is not None and self.terms.active):
            return self.tp.all_reduce(moe_triton(x, router_logits, self.packed, self.routing, correction_bias))
        routes = route_torch(router_logits, self.routing, correction_bias)
        return self.tp.all_reduce(sum_experts(x, *routes, self.num_experts, self._expert))

    def _expert(self, x: torch.Tensor, e: int, rows: torch.Tensor | None) -> torch.Tensor:
        """This worker's summand of one expert, [n, hidden] in float32."""
        terms = self.terms if self.terms is not None and self.terms.active else None
        gate_up = self.multiply_gate_up(x, e)
        if terms is not None:
            gate_up = terms.add_gate_up(gate_up, x, e, rows)
        inner = activate_torch(gate_up.float(), self.activation).to(x.dtype)
        output = self.multiply_down(inner, e)
        if terms is not None:
            output = terms.add_down(output, inner, e, rows)
        return output.float()
