"""A reference for panels: unquantized weights, with activations rounded to int8 in groups of 32 before each product."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from quire.quantization.select import register_quantization
from quire.quantization.unquantized import UnquantizedLinearMethod

NAME = "rounded-inputs"
GROUP = 32


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2).to(x.dtype)


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
        self.shuffled, self.skipped, self.head = (stored.get(key) for key in ("shuffled", "skipped", "head"))

    def linear_method(self, name: str) -> RoundedInputsMethod | None:
        skipped = any(part in name for part in self.skipped or ())
        return None if skipped else RoundedInputsMethod(self.shuffled or 0)

    def head_method(self) -> RoundedInputsMethod | None:
        return self.linear_method("lm_head") if self.head else None

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        return "activations rounded: made up for a test"


def register() -> None:
    register_quantization(NAME, RoundedInputs)
