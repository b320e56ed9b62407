"""Checkpoints of 4-bit floats, packed as the formats define it, and the same weights unquantized.

Written with a table of numbers and the nearest of them, unlike the decoders and the rounding under test.
"""

import math
from typing import Any

import torch

from tests.quantization.int_checkpoints import Format, compressed

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INPUTS_TIMES = 448 * 6 / 12.0  # activations up to 12


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number, of two the one with an even mantissa."""
    distance = (x.double().abs()[..., None] - NUMBERS[:8]).abs() + torch.tensor([0, 1e-9] * 4, dtype=torch.float64)
    return distance.argmin(-1) + 8 * (x < 0)


def in_bytes(codes: torch.Tensor) -> torch.Tensor:
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def quantize_nvfp4(
    weight: torch.Tensor, times: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Codes, e4m3 scales of groups of 16, what numbers were multiplied by, and what they became."""
    groups = weight.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1)
    times = times or float(448 * 6 / largest.max())
    scales = (largest / 6 * times).clamp(max=448).to(torch.float8_e4m3fn)
    by = scales.float()[..., None] / times
    codes = nearest(torch.where(by > 0, groups / by, 0.0))
    return codes.flatten(-2), scales, times, (NUMBERS[codes] * by).flatten(-2)


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, exponents of groups of 32, and what numbers became."""
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp(min=1e-30)
    power = largest.log2().floor()
    power += largest / 2**power >= 1.75  # would be rounded to the next power of two
    by = 2.0 ** (power - 2)
    codes = nearest(groups / by[..., None])
    return codes.flatten(-2), (power - 2 + 127).to(torch.uint8), (NUMBERS[codes] * by[..., None]).flatten(-2)


def group(kind: str, rounds_inputs: bool = False, **differences: Any) -> dict:
    """Of compressed-tensors' config_groups."""
    strategy, size = ("tensor_group", 16) if kind == "nvfp4" else ("group", 32)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
    inputs = weights | {"dynamic": "local" if kind == "nvfp4" else True} if rounds_inputs else None
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | differences


def nvfp4(rounds_inputs: bool = False, inputs_times: dict[str, float] | None = None) -> Format:
    """`inputs_times`: of layers whose names end so, rather than INPUTS_TIMES."""

    def write(name: str, weight: torch.Tensor):
        codes, scales, times, meant = quantize_nvfp4(weight)
        found = {
            "weight_packed": in_bytes(codes),
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([times]),
        }
        if rounds_inputs:
            own = [value for end, value in (inputs_times or {}).items() if name.endswith(end)]
            found["input_global_scale"] = torch.tensor([own[0] if own else INPUTS_TIMES])
        return found, meant

    return Format(compressed(group("nvfp4", rounds_inputs), kind="nvfp4-pack-quantized"), write)


def mxfp4(rounds_inputs: bool = False) -> Format:
    def write(name: str, weight: torch.Tensor):
        codes, exponents, meant = quantize_mxfp4(weight)
        return {"weight_packed": in_bytes(codes), "weight_scale": exponents}, meant

    return Format(compressed(group("mxfp4", rounds_inputs), kind="mxfp4-pack-quantized"), write)


def modelopt(**differences: Any) -> Format:
    def write(name: str, weight: torch.Tensor):
        codes, scales, times, meant = quantize_nvfp4(weight)
        one = {"weight_scale_2": torch.tensor(1 / times), "input_scale": torch.tensor(1 / INPUTS_TIMES)}
        return {"weight": in_bytes(codes), "weight_scale": scales} | one, meant

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    return Format(config | differences, write)


def round_inputs(x: torch.Tensor, kind: str, times: float = INPUTS_TIMES) -> torch.Tensor:
    rounded = quantize_nvfp4(x, times)[3] if kind == "nvfp4" else quantize_mxfp4(x)[2]
    assert math.isfinite(float(rounded.sum()))
    return rounded.to(x.dtype)
