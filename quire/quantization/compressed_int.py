"""Integers of compressed-tensors checkpoints: pack-quantized (W4A16, W8A16) and int-quantized (W8A8)."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.quantization.checkpoint_config import PER_CHANNEL, supported_bits, supported_group_size, unsupported
from quire.quantization.int_linear import Axis, StoredTensor
from quire.quantization.int_weight import IntWeight, checked_groups, unpack_words

PACKED, PLAIN = "pack-quantized", ("int-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group")


@dataclass(frozen=True)
class CompressedScheme:
    """weight_packed [outputs, inputs packed] or weight int8 [outputs, inputs]; weight_scale [outputs, groups] or [1];
    weight_zero_point, packed along outputs or int8; weight_g_idx [inputs]."""

    bits: int
    group_size: int
    packed: bool
    symmetric: bool
    per_tensor: bool = False
    static_inputs: bool = False  # have a scale in the checkpoint
    int8_inputs: bool = False  # inputs are quantized, symmetrically, and weights as that needs

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        each, rows = 32 // self.bits if self.packed else 1, Axis(0)
        by_group = StoredTensor((outputs, groups), torch.float32, rows, any_shape=True)
        one = StoredTensor((1,), torch.float32, any_shape=True)
        found = {"weight_scale": one if self.per_tensor else by_group}
        if self.packed:
            if inputs % each:
                raise ValueError(f"its {inputs} inputs are no multiple of {each}, the numbers of a packed word")
            words = (outputs, inputs // each)
            found["weight_packed"] = StoredTensor(words, torch.int32, rows, Axis(1, each))
            found["weight_shape"] = StoredTensor((2,), torch.int64, optional=True)
        else:
            found["weight"] = StoredTensor((outputs, inputs), torch.int8, rows, Axis(1))
        if not self.symmetric and self.per_tensor:
            found["weight_zero_point"] = StoredTensor((1,), torch.int16, any_shape=True)
        elif not self.symmetric and self.packed:
            words = (-(-outputs // each), groups)
            found["weight_zero_point"] = StoredTensor(words, torch.int32, Axis(0, each))
        elif not self.symmetric:
            found["weight_zero_point"] = StoredTensor((outputs, groups), torch.int16, rows, any_shape=True)
        found["weight_g_idx"] = StoredTensor((inputs,), torch.int64, inputs=Axis(0), optional=True)
        if self.static_inputs:
            found["input_scale"] = StoredTensor((1,), torch.float32, any_shape=True, dummy="ones")
        found["input_zero_point"] = StoredTensor((1,), torch.float32, any_shape=True, optional=True)
        return found

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        scales, middle = stored["weight_scale"], 1 << (self.bits - 1)
        if self.per_tensor:
            scales = scales.expand(outputs, 1).contiguous()
        if self.packed:
            codes = unpack_words(stored["weight_packed"], self.bits)
        else:
            codes = (stored["weight"].to(torch.int16) + middle).to(torch.uint8)
            if self.bits < 8 and int(codes.max()) >> self.bits:
                raise ValueError(f"its weight has numbers that are not of {self.bits} bits")
        groups = stored.get("weight_g_idx")
        if groups is not None and bool((groups == -1).all()):
            groups = None  # there, but not set
        return IntWeight(
            self.bits, codes, scales, self._zeros(stored, outputs, middle), group_size,
            checked_groups(groups, scales.shape[1]), stored.get("input_scale"),
        )  # fmt: skip

    def describe(self) -> str:
        groups = "a scale per output or tensor" if self.group_size < 0 else f"groups of {self.group_size}"
        return f"{self.bits}-bit weights, {groups}"

    def _zeros(self, stored: dict[str, torch.Tensor], outputs: int, middle: int) -> torch.Tensor | None:
        zeros = stored.get("weight_zero_point")
        if zeros is None:
            return None
        if self.per_tensor:
            return zeros.to(torch.int16).expand(outputs, 1) + middle
        if self.packed:
            return unpack_words(zeros.t(), self.bits).t()[:outputs].to(torch.int16).contiguous()
        return zeros.to(torch.int16) + middle


def int_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str | None) -> CompressedScheme:
    """Of a group's `weights` and `input_activations`, stored in format `kind`."""
    if kind != PACKED and kind not in PLAIN:
        raise unsupported(f"compressed-tensors format {kind!r} for integers", ", ".join((PACKED, *PLAIN)))
    bits = supported_bits(weights.get("num_bits", 8), (4, 8))
    group_size, strategy = weights.get("group_size"), weights.get("strategy")
    strategy = strategy or ("group" if group_size and group_size > 0 else "channel" if group_size else "tensor")
    if strategy not in STRATEGIES:
        raise unsupported(f"weights by {strategy}", ", ".join(STRATEGIES))
    if inputs is not None and (inputs.get("type", "int") != "int" or inputs.get("num_bits", 8) != 8):
        found = f"{inputs.get('num_bits')}-bit {inputs.get('type')} input_activations with integer weights"
        raise unsupported(found, "none, or 8-bit int")
    symmetric, of_inputs = bool(weights.get("symmetric", True)), (inputs or {}).get("symmetric", True)
    return CompressedScheme(
        bits,
        supported_group_size(group_size) if strategy == "group" else PER_CHANNEL,
        packed=kind == PACKED,
        symmetric=symmetric,
        per_tensor=strategy == "tensor",
        static_inputs=inputs is not None and not inputs.get("dynamic"),
        int8_inputs=inputs is not None and bits == 8 and strategy != "group" and symmetric and bool(of_inputs),
    )
