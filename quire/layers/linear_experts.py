"""Experts with the methods of linear layers, for weights that the kernels of mixtures do not multiply."""

import functools
import logging
from collections.abc import Iterator

import torch
from torch import nn

from quire.kernels.int_linear import PANEL, stack_experts
from quire.kernels.moe import Activation, Fp8ExpertWeights
from quire.kernels.moe_routing import Routing
from quire.kernels.moe_table import MAX_EXPERTS
from quire.kernels.quantize_fp8 import FP8
from quire.layers.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear
from quire.layers.packed_experts import PackedExperts
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import CanDequantize, LinearMethod, keep
from quire.quantization.fp4_linear import input_rounding
from quire.quantization.fp8_experts import quantizes_rows, stack_fp8_experts
from quire.quantization.int_triton import IntPart, packed_of

logger = logging.getLogger("quire")

SharedLinears = tuple[MergedColumnParallelLinear, RowParallelLinear]
ExpertMethods = tuple[LinearMethod | None, LinearMethod | None]  # gate and up; down


class LinearExperts(PackedExperts):
    """As FusedMoE, but each expert is two linear layers, each with its method, multiplied one expert at a time.

    Those that are quantized alike on a GPU become one weight after loading, for the kernels of mixtures. Those that are
    not are dequantized for these, if their methods can.
    """

    def __init__(
        self,
        num_experts: int,
        routing: Routing,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
        methods: list[ExpertMethods],  # of each expert
        tp: TensorParallel = SINGLE,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        shared: SharedLinears | None = None,
    ) -> None:
        """`shared`: gate and up, and down of one more expert, which every row has. It is multiplied with the others if
        it is packed as they are (`has_shared`); else its owner multiplies by it."""
        super().__init__(num_experts, routing, hidden_size, intermediate_size, device, tp, activation=activation)
        self.shared: SharedLinears | None
        keep(self, "shared", shared)
        placed = (bias, dtype, device, tp)
        self.gate_up = nn.ModuleList(
            MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, *placed, method) for method, _ in methods
        )
        self.down = nn.ModuleList(
            RowParallelLinear(intermediate_size, hidden_size, *placed, method) for _, method in methods
        )

    def process_after_loading(self) -> None:
        """After that of the experts' layers, and of the shared one's."""
        if self.shared is not None and self._stacks_with(self.shared):
            self.routing, self.num_experts = self.routing.with_shared(1), self.num_experts + 1
            for layers, linear in zip((self.gate_up, self.down), self.shared, strict=True):
                layers.append(linear)
        gate_up, down = (stack_experts([packed_of(e) for e in layers]) for layers in (self.gate_up, self.down))
        biases = self._biases()
        can_round, rounding = input_rounding(list(self.gate_up), list(self.down))
        packs = gate_up is not None and down is not None and can_round
        if packs and self.keep_packed(gate_up, down, *biases, rounding=rounding):  # type: ignore[arg-type]
            for layers, stacked in ((self.gate_up, gate_up), (self.down, down)):
                assert stacked is not None
                for e, layer in enumerate(layers):
                    keep(layer, "int_parts", [IntPart(stacked.expert(e), None)])  # views: nothing is kept twice
        elif biases == (None, None) and self.can_sort and (fp8 := self._stacked_fp8()) is not None:
            self.keep_fp8(fp8)
        elif all(isinstance(e.method, CanDequantize) for e in self._linears()) and self.can_sort:
            _log_dequantized()
            self.keep_dense(*self._dequantized(), *biases)
        elif self.device.type != "cpu":
            _warn_slow()

    def _stacks_with(self, shared: SharedLinears) -> bool:
        """Whether it is in fp8 as all others are, and there are kernels for that."""
        layers = [*self._linears(), *shared]
        groups = {getattr(layer, "scale_groups", None) for layer in layers}
        in_fp8 = all(getattr(getattr(layer, "weight", None), "dtype", None) is FP8 for layer in layers)
        alike = in_fp8 and len(groups) == 1 and len({quantizes_rows(layer) for layer in layers}) == 1
        return alike and self.can_sort and self.num_experts < MAX_EXPERTS and self.width % PANEL == 0

    def _stacked_fp8(self) -> Fp8ExpertWeights | None:
        quantizes = {quantizes_rows(layer) for layer in self._linears()}
        if self.width % PANEL or len(quantizes) > 1:
            return None
        gate_up, down = stack_fp8_experts(self.gate_up), stack_fp8_experts(self.down)
        if gate_up is None or down is None:
            return None
        return Fp8ExpertWeights(gate_up, down, quantizes.pop(), self.activation)

    def _linears(self) -> Iterator[ParallelLinear]:
        for layer in (*self.gate_up, *self.down):
            assert isinstance(layer, ParallelLinear)
            yield layer

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[E, 2 * I] and [E, H]; the latter is added by one worker, or the sum would hold it once per worker."""
        own = [[layer.bias for layer in layers if layer.bias is not None] for layers in (self.gate_up, self.down)]
        gate_up, down = (torch.stack(found) if found else None for found in own)  # type: ignore[arg-type]
        return gate_up, down if self.tp.rank == 0 else None

    def _dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[E, 2 * I, H] and [E, H, I], which the experts' layers then have parts of."""
        stacked = []
        for layers in (self.gate_up, self.down):
            whole = torch.stack([e.method.dequantized(e) for e in layers])  # type: ignore[union-attr, operator]
            for layer, own in zip(layers, whole, strict=True):
                keep(layer, "int_parts", [IntPart(own, None)])
                if hasattr(layer, "weight"):
                    del layer.weight
            stacked.append(whole)
        return stacked[0], stacked[1]

    def multiply_gate_up(self, x: torch.Tensor, e: int) -> torch.Tensor:
        product: torch.Tensor = self.gate_up[e](x)
        return product

    def multiply_down(self, inner: torch.Tensor, e: int) -> torch.Tensor:
        down = self.down[e]
        assert isinstance(down, RowParallelLinear)
        return down.method.apply(down, inner, down.bias if self.tp.rank == 0 else None)


@functools.cache
def _log_dequantized() -> None:
    """Once for all layers."""
    logger.warning("experts of a layer, perhaps of others, are dequantized: they are not all packed alike")


@functools.cache
def _warn_slow() -> None:
    """Once for all layers."""
    logger.warning("quantized experts are multiplied one at a time on this device, which is slow")
