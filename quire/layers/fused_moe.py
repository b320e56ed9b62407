"""The mixture-of-experts layer."""

from typing import Literal

import torch
from torch import nn

from quire.kernels.moe import (
    Activation,
    ExpertWeights,
    RouterScoring,
    experts_torch,
    fused_layer,
    moe_triton,
    prepare_moe,
    route_torch,
)
from quire.kernels.moe_table import max_fused_rows
from quire.kernels.native import moe as native_moe
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.layers.moe_backend import choose_moe_backend
from quire.layers.parallel import SINGLE, TensorParallel

Slots = dict[tuple[str, ShardId], LoadSlot]


class HalvesSlot(LoadSlot):
    """For [experts, gate and up, ...]: a worker holds a shard of each half."""

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        halves = full.unflatten(1, (2, -1))
        return halves.narrow(2, self.start, self.view.shape[1] // 2).flatten(1, 2)


class FusedMoE(nn.Module):
    """Every expert is down(activation(gate(x)) * up(x)); a row's result is the weighted sum of its top_k experts'.

    `checkpoint` says how weights are stored: one tensor for each expert and projection, or all experts in one. Workers
    each have a part of every expert's intermediate size.
    """

    gate_up: nn.Parameter  # [E, 2 * I, H], gate before up
    down: nn.Parameter  # [E, H, I]

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        *,
        renormalize: bool = True,
        scoring: RouterScoring = "softmax",
        activation: Activation = "silu",
        bias: bool = False,
        checkpoint: Literal["per_expert", "fused"] = "per_expert",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}, but there are {num_experts} experts; allowed: 1 to {num_experts}")
        if bias and checkpoint == "per_expert":
            raise ValueError("biases are only read from a checkpoint that stores all experts in one tensor")
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.tp, self.renormalize, self.scoring, self.activation = tp, renormalize, scoring, activation
        self.checkpoint = checkpoint
        self.backend = choose_moe_backend(device.type, dtype, num_experts, backend)
        self.width = width = tp.share(intermediate_size, "the experts' intermediate size")
        self.gate_up = new_parameter(num_experts, 2 * width, hidden_size, dtype=dtype, device=device)
        self.down = new_parameter(num_experts, hidden_size, width, dtype=dtype, device=device)
        self.gate_up_bias = new_parameter(num_experts, 2 * width, dtype=dtype, device=device) if bias else None
        self.down_bias = new_parameter(num_experts, hidden_size, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """x [N, hidden], router_logits [N, experts] -> [N, hidden]."""
        return self.tp.all_reduce(self._local(x, router_logits))

    def forward_fused(
        self,
        stream: torch.Tensor,
        norm: RMSNormParams,
        router_weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        router_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, router, experts, and the sum with the residual, for at most `max_fused_rows` rows on a GPU."""
        return fused_layer(
            stream,
            norm,
            router_weight,
            router_bias,
            self._weights(),
            self.top_k,
            renormalize=self.renormalize,
            scoring=self.scoring,
            residual=residual,
        )

    @property
    def max_fused_rows(self) -> int:
        if not self.backend.fuses_layer or self.tp.size > 1:
            return 0
        return max_fused_rows((self.num_experts, self.top_k, self.hidden_size, self.width))

    def process_after_loading(self) -> None:
        """Packs the weights, and frees the originals, if the backend multiplies by packed ones."""
        prepare_moe(self.gate_up.device)
        if not self.backend.packs_weights:
            return
        gate_up = native_moe.pack_experts(self.gate_up.data)
        del self.gate_up
        down = native_moe.pack_experts(self.down.data)
        del self.down
        biases = (self._data(self.gate_up_bias), self._data(self._own_down_bias()))
        packed = native_moe.PackedExperts(gate_up, down, *biases, self.activation, self.hidden_size, self.width)
        object.__setattr__(self, "packed_experts", packed)  # no module, parameter or buffer

    def load_slots(self) -> Slots:
        start, full = self.width * self.tp.rank, self.intermediate_size
        slots: Slots = {}
        if self.checkpoint == "per_expert":
            half, whole = (full, self.hidden_size), (self.hidden_size, full)
            for e in range(self.num_experts):
                for shard, view in enumerate(self.gate_up.data[e].split(self.width)):
                    slots[f"gate_up.{e}.weight", shard] = LoadSlot(view, half, 0, start)
                slots[f"down.{e}.weight", None] = LoadSlot(self.down.data[e], whole, 1, start)
            return slots
        experts, hidden = self.num_experts, self.hidden_size
        slots["gate_up", None] = HalvesSlot(self.gate_up.data, (experts, 2 * full, hidden), 1, start)
        slots["down", None] = LoadSlot(self.down.data, (experts, hidden, full), 2, start)
        if self.gate_up_bias is not None and self.down_bias is not None:
            slots["gate_up_bias", None] = HalvesSlot(self.gate_up_bias.data, (experts, 2 * full), 1, start, "zeros")
            slots["down_bias", None] = LoadSlot(self.down_bias.data, (experts, hidden), dummy="zeros")
        return slots

    def dummy_slots(self) -> Slots:
        """Whole tensors, to fill at random: slots of single experts would be thousands."""
        kinds = {"gate_up": "normal", "down": "normal", "gate_up_bias": "zeros", "down_bias": "zeros"}
        return {
            (name, None): LoadSlot(parameter.data, tuple(parameter.shape), dummy=kinds[name])  # type: ignore[arg-type]
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _local(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """This worker's summand of the all-reduce."""
        if self.backend.name == "triton":
            return moe_triton(
                x, logits, self._weights(), self.top_k, renormalize=self.renormalize, scoring=self.scoring
            )
        packed: native_moe.PackedExperts | None = getattr(self, "packed_experts", None)
        if packed is not None:
            routes = native_moe.route(logits, self.top_k, self.renormalize or self.scoring == "topk_softmax")
            return native_moe.moe(x, *routes, packed)
        routes = route_torch(logits, self.top_k, renormalize=self.renormalize, scoring=self.scoring)
        return experts_torch(x, *routes, self._weights())

    def _weights(self) -> ExpertWeights:
        down_bias = self._own_down_bias()
        return ExpertWeights(self.gate_up, self.down, self.gate_up_bias, down_bias, self.activation)

    def _own_down_bias(self) -> torch.Tensor | None:
        # One worker adds it, or the sum would hold it once per worker.
        return self.down_bias if self.tp.rank == 0 else None

    @staticmethod
    def _data(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.data
