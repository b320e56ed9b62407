"""Experts that a checkpoint has in one tensor of mxfp4 (gpt-oss), kept at 4 bits."""

import torch

from quire.kernels.int_linear import PackedIntWeight, linear, pack_int_weight, prepare_int_linear, stack_experts
from quire.kernels.moe import Activation
from quire.kernels.moe_routing import Routing
from quire.layers.fused_moe import HalvesSlot
from quire.layers.load_slot import LoadSlot, Slots, new_parameter
from quire.layers.packed_experts import PackedExperts
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import keep
from quire.quantization.fp4 import MXFP4_GROUP, codes_of_bytes, powers_of_two


class Mxfp4Experts(PackedExperts):
    """`_blocks` [E, outputs, groups, 16], two numbers in a byte, and `_scales` [E, outputs, groups], exponents."""

    gate_up: PackedIntWeight  # [E, 2 * I, H], gate before up
    down: PackedIntWeight  # [E, H, I]

    def __init__(
        self,
        num_experts: int,
        routing: Routing,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        *,
        activation: Activation = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__(num_experts, routing, hidden_size, intermediate_size, device, tp, activation=activation)
        for what, size in (("hidden size", hidden_size), ("intermediate size of a worker", self.width)):
            if size % MXFP4_GROUP:
                raise ValueError(f"the experts' {what} is {size}; in mxfp4 it must be a multiple of {MXFP4_GROUP}")
        self.dtype = dtype
        self.gate_up_bias = new_parameter(num_experts, 2 * self.width, dtype=dtype, device=device) if bias else None
        self.down_bias = new_parameter(num_experts, hidden_size, dtype=dtype, device=device) if bias else None

    def load_slots(self) -> Slots:
        experts, hidden, full = self.num_experts, self.hidden_size, self.intermediate_size
        groups, start = (hidden // MXFP4_GROUP, full // MXFP4_GROUP), self.width * self.tp.rank
        first, second = (experts, 2 * self.width, groups[0]), (experts, hidden, self.width // MXFP4_GROUP)
        stored = {
            f"{name}_{kind}": torch.empty(*shape, *last, dtype=torch.uint8, device=self.device)
            for name, shape in (("gate_up", first), ("down", second))
            for kind, last in (("blocks", (MXFP4_GROUP // 2,)), ("scales", ()))
        }
        keep(self, "stored", stored)
        slots: Slots = {}
        for kind, last, dummy in (("blocks", (MXFP4_GROUP // 2,), "normal"), ("scales", (), "zeros")):
            halves = (experts, 2 * full, groups[0], *last)
            slots[f"gate_up_{kind}", None] = HalvesSlot(stored[f"gate_up_{kind}"], halves, 1, start, dummy)  # type: ignore[arg-type]
            whole = (experts, hidden, groups[1], *last)
            slots[f"down_{kind}", None] = LoadSlot(stored[f"down_{kind}"], whole, 2, start // MXFP4_GROUP, dummy)  # type: ignore[arg-type]
        if self.gate_up_bias is not None and self.down_bias is not None:
            slots["gate_up_bias", None] = HalvesSlot(self.gate_up_bias.data, (experts, 2 * full), 1, start, "zeros")
            slots["down_bias", None] = LoadSlot(self.down_bias.data, (experts, hidden), dummy="zeros")
        return slots

    def process_after_loading(self) -> None:
        stored: dict[str, torch.Tensor] = self.stored  # type: ignore[assignment]
        del self.stored
        for name in ("gate_up", "down"):
            keep(self, name, self._packed(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales")))
        prepare_int_linear(self.device)
        self.keep_packed(self.gate_up, self.down, _data(self.gate_up_bias), self._own_down_bias())

    def _packed(self, blocks: torch.Tensor, exponents: torch.Tensor) -> PackedIntWeight:
        if bool((exponents == 255).any()):
            raise ValueError("experts in mxfp4: some of their scales are no numbers; allowed: exponents from 0 to 254")
        # One expert at a time: codes take twice the stored size, and more while they are packed.
        each = [
            pack_int_weight(codes_of_bytes(b.flatten(-2)), powers_of_two(e), None, 4, self.dtype, "e2m1")
            for b, e in zip(blocks, exponents, strict=True)
        ]
        found = stack_experts([*each])
        assert found is not None
        return found

    def multiply_gate_up(self, x: torch.Tensor, e: int) -> torch.Tensor:
        return linear(x, self.gate_up.expert(e), None if self.gate_up_bias is None else self.gate_up_bias[e])

    def multiply_down(self, inner: torch.Tensor, e: int) -> torch.Tensor:
        bias = self._own_down_bias()
        return linear(inner, self.down.expert(e), None if bias is None else bias[e])

    def _own_down_bias(self) -> torch.Tensor | None:
        # One worker adds it, or the sum would hold it once per worker.
        return _data(self.down_bias) if self.tp.rank == 0 else None


def _data(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.data
