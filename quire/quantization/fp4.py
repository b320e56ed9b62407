"""4-bit floats as checkpoints store them: two in a byte, with exponents or fp8 scales for groups of inputs."""

from dataclasses import dataclass, replace

import torch

from quire.kernels.round_fp4 import mantissa
from quire.quantization.int_linear import Axis, StoredTensor
from quire.quantization.int_weight import IntWeight

MXFP4_GROUP, NVFP4_GROUP = 32, 16
SMALLEST_FACTOR = 1e-30  # of a tensor: its products with other scales are float32


def codes_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], the first number in the low bits -> uint8 [..., 2 * n]: sign, exponent (2 bits), mantissa."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 with a bias of 127, as e8m0 has it -> bfloat16, which has the same exponents."""
    bits = exponents.to(torch.int16)
    return torch.where(bits == 0, 0x40, bits << 7).to(torch.int16).view(torch.bfloat16)  # 2^-127 is subnormal


@dataclass(frozen=True)
class Fp4Scheme:
    """A layer's weight [outputs, inputs / 2] uint8 and weight_scale [outputs, groups]: of NVFP4 e4m3 numbers, and a
    scale of the tensor, of MXFP4 exponents. With `rounds_inputs` (W4A4) NVFP4 has a scale of the inputs too."""

    weight: str = "weight_packed"
    global_scale: str | None = None  # None: MXFP4
    input_scale: str | None = None
    reciprocal: bool = False  # these two are what numbers were multiplied by, rather than what they are multiplied by
    rounds_inputs: bool = False

    @property
    def group_size(self) -> int:
        return MXFP4_GROUP if self.global_scale is None else NVFP4_GROUP

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        kind = torch.uint8 if self.global_scale is None else torch.float8_e4m3fn
        one = StoredTensor((1,), torch.float32, any_shape=True, dummy="ones")
        found = {
            self.weight: StoredTensor((outputs, inputs // 2), torch.uint8, Axis(0), Axis(1, 2)),
            "weight_scale": StoredTensor((outputs, groups), kind, Axis(0), any_shape=True),
        }
        if self.global_scale is not None:
            found[self.global_scale] = one
        if self.input_scale is not None:
            found[self.input_scale] = replace(one, optional=not self.rounds_inputs)
        return found

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        codes, scales = codes_of_bytes(stored[self.weight]), stored["weight_scale"]
        if self.global_scale is None:
            return IntWeight(4, codes, powers_of_two(scales).float(), None, group_size, kind="e2m1")
        factor = self._factor(stored, self.global_scale)
        if self.rounds_inputs:
            factor /= mantissa(self.inputs_times(stored))  # see round_nvfp4
        factors = torch.full((outputs,), factor, device=codes.device)
        return IntWeight(4, codes, scales.float(), None, group_size, kind="e2m1", factors=factors)

    def inputs_times(self, stored: dict[str, torch.Tensor]) -> float:
        """What inputs of NVFP4 are multiplied by before their groups' scales are rounded to e4m3."""
        assert self.input_scale is not None
        return 1.0 / self._factor(stored, self.input_scale)

    def _factor(self, stored: dict[str, torch.Tensor], name: str) -> float:
        value = float(stored[name])
        if not SMALLEST_FACTOR <= value <= 1.0 / SMALLEST_FACTOR:
            raise ValueError(
                f"its {name} is {value}; allowed: numbers from {SMALLEST_FACTOR:g} to {1 / SMALLEST_FACTOR:g}"
            )
        return 1.0 / value if self.reciprocal else value

    def describe(self) -> str:
        kind = "mxfp4" if self.global_scale is None else "nvfp4"
        inputs = f", activations rounded to {kind}" if self.rounds_inputs else ""
        return f"4-bit floats ({kind}), groups of {self.group_size}{inputs}"
