"""The mixture-of-experts layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels import native
from quire.kernels.add import add
from quire.kernels.invariant_linear import invariant_linear
from quire.kernels.moe import (
    Activation,
    ExpertWeights,
    activate_torch,
    experts_torch,
    fused_layer,
    moe_triton,
    prepare_moe,
    sum_experts,
)
from quire.kernels.moe_routing import Routing, route_torch
from quire.kernels.moe_table import MAX_FUSED_ROWS, GroupedConfig, max_fused_rows
from quire.kernels.native import moe as native_moe
from quire.kernels.rms_norm import RMSNormParams, rms_norm
from quire.layers.expert_terms import ExpertTerms
from quire.layers.load_slot import LoadSlot, Slots, new_parameter
from quire.layers.moe_backend import choose_moe_backend
from quire.layers.parallel import SINGLE, TensorParallel

# How weights are stored: a tensor for each expert and projection, or all experts in one, and gate and up.
ExpertCheckpoint = Literal["per_expert", "fused"]


class HalvesSlot(LoadSlot):
    """For [experts, gate and up, ...]: a worker holds a shard of each half."""

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        halves = full.unflatten(1, (2, -1))
        return halves.narrow(2, self.start, self.view.shape[1] // 2).flatten(1, 2)

    def pieces(self, view: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        starts = (self.start, self.full_shape[1] // 2 + self.start)
        return [(half, 1, start) for half, start in zip(view.chunk(2, dim=1), starts, strict=True)]


class SharedSlot(LoadSlot):
    """For the shared experts, which a checkpoint has as one of their widths together: a worker holds a shard of that,
    split again into experts. The view is [experts, outputs, inputs]."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        count, outputs, inputs = self.view.shape
        return (count * outputs, inputs) if self.dim == 0 else (outputs, count * inputs)

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        whole = torch.empty(self.part_shape, dtype=self.view.dtype, device=self.view.device)
        yield whole
        self.view.copy_(whole.unflatten(self.dim, (len(self.view), -1)).movedim(self.dim, 0))

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        return full.narrow(self.dim, self.start, self.view.shape[0] * self.view.shape[1 + self.dim])


class FusedMoE(nn.Module):
    """Every expert is down(activation(gate(x)) * up(x)); a row's result is the weighted sum of its experts'.

    Workers each have a part of every expert's intermediate size. The shared experts of the routing are the last of all.
    """

    gate_up: nn.Parameter  # [E, 2 * I, H], gate before up
    down: nn.Parameter  # [E, H, I]

    def __init__(
        self,
        num_experts: int,  # without the shared ones
        routing: Routing,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        checkpoint: ExpertCheckpoint = "per_expert",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        routing.check(num_experts)
        if bias and routing.shared:
            raise ValueError("shared experts have no biases, and cannot be among experts that have")
        self.num_routed, self.routing = num_experts, routing
        self.num_experts = num_experts = num_experts + routing.shared
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.tp, self.activation = tp, activation
        self.checkpoint = checkpoint
        self.terms: ExpertTerms | None = None  # of adapters
        self.tiles: GroupedConfig | None = None  # for any number of rows; None: by their number
        self.backend = choose_moe_backend(device.type, dtype, num_experts, backend)
        self.width = width = tp.share(intermediate_size, "the experts' intermediate size")
        self.gate_up = new_parameter(num_experts, 2 * width, hidden_size, dtype=dtype, device=device)
        self.down = new_parameter(num_experts, hidden_size, width, dtype=dtype, device=device)
        self.gate_up_bias = new_parameter(num_experts, 2 * width, dtype=dtype, device=device) if bias else None
        self.down_bias = new_parameter(num_experts, hidden_size, dtype=dtype, device=device) if bias else None

    def forward(
        self, x: torch.Tensor, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, hidden], router_logits [N, routed experts], bias of their choice [routed experts] -> [N, hidden]."""
        return self.tp.all_reduce(self._local(x, router_logits, correction_bias))

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
        if self.tiles is not None:
            x = rms_norm(stream, *norm)
            out = self(x, invariant_linear(x, router_weight, router_bias), correction_bias)
            return out if residual is None else add(out, residual)
        out = fused_layer(
            stream,
            norm,
            router_weight,
            router_bias,
            self._weights(),
            self.routing,
            correction_bias,
            residual=residual if self.tp.rank == 0 else None,  # once in the sum
        )
        return self.tp.all_reduce(out)

    @property
    def has_shared(self) -> bool:
        """Whether shared experts are among these."""
        return self.routing.shared > 0

    @property
    def max_fused_rows(self) -> int:
        if self.tiles is not None:
            return MAX_FUSED_ROWS
        if not self.backend.fuses_layer:
            return 0
        return max_fused_rows((self.num_experts, self.routing.slots, self.hidden_size, self.width))

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
            for e in range(self.num_routed):
                for shard, view in enumerate(self.gate_up.data[e].split(self.width)):
                    slots[f"gate_up.{e}.weight", shard] = LoadSlot(view, half, 0, start)
                slots[f"down.{e}.weight", None] = LoadSlot(self.down.data[e], whole, 1, start)
                if self.gate_up_bias is not None and self.down_bias is not None:
                    for shard, view in enumerate(self.gate_up_bias.data[e].split(self.width)):
                        slots[f"gate_up.{e}.bias", shard] = LoadSlot(view, half[:1], 0, start, "zeros")
                    slots[f"down.{e}.bias", None] = LoadSlot(self.down_bias.data[e], whole[:1], dummy="zeros")
            return slots
        experts, hidden = self.num_routed, self.hidden_size
        slots["gate_up", None] = HalvesSlot(self.gate_up.data[:experts], (experts, 2 * full, hidden), 1, start)
        slots["down", None] = LoadSlot(self.down.data[:experts], (experts, hidden, full), 2, start)
        if self.gate_up_bias is not None and self.down_bias is not None:
            slots["gate_up_bias", None] = HalvesSlot(self.gate_up_bias.data, (experts, 2 * full), 1, start, "zeros")
            slots["down_bias", None] = LoadSlot(self.down_bias.data, (experts, hidden), dummy="zeros")
        return slots

    def shared_slots(self) -> Slots:
        """Of the shared experts as an MLP of their widths together, by the names of that."""
        first, width, hidden, shared = self.num_routed, self.width, self.hidden_size, self.routing.shared
        full, start = shared * self.intermediate_size, shared * width * self.tp.rank
        gate, up = self.gate_up.data[first:].split(width, dim=1)
        return {
            ("up_proj.weight", 0): SharedSlot(gate, (full, hidden), 0, start),
            ("up_proj.weight", 1): SharedSlot(up, (full, hidden), 0, start),
            ("down_proj.weight", None): SharedSlot(self.down.data[first:], (hidden, full), 1, start),
        }

    def dummy_slots(self) -> Slots:
        """Whole tensors, to fill at random: slots of single experts would be thousands."""
        kinds = {"gate_up": "normal", "down": "normal", "gate_up_bias": "zeros", "down_bias": "zeros"}
        return {
            (name, None): LoadSlot(parameter.data, tuple(parameter.shape), dummy=kinds[name])  # type: ignore[arg-type]
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _local(self, x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """This worker's summand of the all-reduce."""
        if self.terms is not None and self.terms.active:
            return self._local_with_terms(x, logits, bias, self.terms)
        if self.backend.name == "triton":
            return moe_triton(x, logits, self._weights(), self.routing, bias, config=self.tiles)
        packed: native_moe.PackedExperts | None = getattr(self, "packed_experts", None)
        if packed is not None:
            return native_moe.moe(x, *native_moe.route(logits, self.routing, bias), packed)
        return experts_torch(x, *route_torch(logits, self.routing, bias), self._weights())

    def _local_with_terms(
        self, x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None, terms: ExpertTerms
    ) -> torch.Tensor:
        """One expert at a time: a term of gate and up comes before the activation, inside the kernels of mixtures."""

        def expert(x: torch.Tensor, e: int, rows: torch.Tensor | None) -> torch.Tensor:
            gate_up = terms.add_gate_up(self._multiply("gate_up", x, e), x, e, rows)
            inner = activate_torch(gate_up.float(), self.activation).to(x.dtype)
            return terms.add_down(self._multiply("down", inner, e), inner, e, rows).float()

        return sum_experts(x, *route_torch(logits, self.routing, bias), self.num_experts, expert)

    def _multiply(self, name: Literal["gate_up", "down"], x: torch.Tensor, e: int) -> torch.Tensor:
        biases = self.gate_up_bias if name == "gate_up" else self._own_down_bias()
        bias = None if biases is None else biases[e]
        packed: native_moe.PackedExperts | None = getattr(self, "packed_experts", None)
        if packed is None:
            return F.linear(x, getattr(self, name)[e], bias)
        outputs = 2 * self.width if name == "gate_up" else self.hidden_size
        return native.linear(x, getattr(packed, name)[e], outputs, bias)

    def _weights(self) -> ExpertWeights:
        down_bias = self._own_down_bias()
        return ExpertWeights(self.gate_up, self.down, self.gate_up_bias, down_bias, self.activation)

    def _own_down_bias(self) -> torch.Tensor | None:
        # One worker adds it, or the sum would hold it once per worker.
        return self.down_bias if self.tp.rank == 0 else None

    @staticmethod
    def _data(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return None if parameter is None else parameter.data
