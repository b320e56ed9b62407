"""References: unquantized weights, with activations rounded before each product; to int8 in groups of 32 for panels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from quire.quantization.base import LinearMethod
from quire.quantization.select import register_quantization
from quire.quantization.unquantized import UnquantizedLinearMethod

NAME = "rounded-inputs"
GROUP = 32


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2).to(x.dtype)


def round_to_fp8(x: torch.Tensor, group: int | None, scale: float | None = None) -> torch.Tensor:
    """By row, by group of a row, or by a fixed scale."""
    groups = x.float() if group is None else x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448 if scale is None else torch.tensor(scale)
    rounded = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    return rounded.reshape(x.shape).to(x.dtype)


def round_to_int8(x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """By row, or by a fixed scale."""
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127 if scale is None else scale
    return ((x.float() / scales).round().clamp(-127, 127) * scales).to(x.dtype)


@dataclass(frozen=True)
class Fp8InputsMethod(UnquantizedLinearMethod):
    group: int | None
    scale: float | None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(round_to_fp8(x, self.group, self.scale), layer.weight, bias)


@dataclass(frozen=True)
class Int8InputsMethod(UnquantizedLinearMethod):
    scale: float | None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(round_to_int8(x, self.scale), layer.weight, bias)


@dataclass(frozen=True)
class RoundedInputsMethod(UnquantizedLinearMethod):
    shuffled: int = 0  # the group size where groups are as int_checkpoints.quantize shuffles them

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = layer.weight
        if self.shuffled:
            groups = np.random.default_rng(x.shape[1]).permutation(np.arange(x.shape[1]) // self.shuffled)
            order = np.argsort(groups, kind="stable")
            x, weight = x[:, order], weight[:, order]
        return F.linear(round_inputs(x), weight, bias)


class RoundedInputs:
    ignored: tuple[str, ...] = ()

    def __init__(self, stored: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.fp8: dict[str, Any] | None = stored.get("fp8")
        self.int8: dict[str, Any] | None = stored.get("int8")
        self.shuffled, self.skipped, self.head = (stored.get(key) for key in ("shuffled", "skipped", "head"))

    def linear_method(self, name: str) -> LinearMethod | None:
        skipped = any(part in name for part in self.skipped or ())
        if self.fp8 is not None and not skipped:
            return Fp8InputsMethod(self.fp8.get("group"), self.fp8.get("scale"))
        if self.int8 is not None and not skipped:
            return Int8InputsMethod(self.int8.get("scale"))
        return None if skipped else RoundedInputsMethod(self.shuffled or 0)

    def head_method(self) -> LinearMethod | None:
        return self.linear_method("lm_head") if self.head else None

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        return "activations rounded: made up for a test"


def register() -> None:
    register_quantization(NAME, RoundedInputs)
