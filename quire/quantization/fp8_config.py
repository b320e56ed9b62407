"""How fp8 weights are scaled, and the quantization_config of method fp8."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.values import whole_number
from quire.quantization.checkpoint_config import names_in, unsupported, well_formed

ONLINE = ("fp8", "fp8_per_tensor")  # applied to an unquantized checkpoint while loading

# Activations are quantized by token (with blocks by token and group of inputs), by a scale of the checkpoint, or not.
Activations = Literal["dynamic", "static", "none"]


@dataclass(frozen=True)
class Fp8Scheme:
    """Weights in e4m3 with float32 scales: one per tensor, per output or per block."""

    per_channel: bool = False
    block: tuple[int, int] | None = None  # outputs, inputs
    activations: Activations = "dynamic"
    scale_name: str = "weight_scale"

    def __post_init__(self) -> None:
        if self.block is None:
            return
        for size in self.block:
            whole_number("a block size of weights (quantization_config)", size)
        if len(self.block) != 2 or self.activations == "static":
            raise unsupported(
                f"blocks of {list(self.block)} with {self.activations} activations",
                "[rows, columns] with dynamic activations, or none quantized",
            )

    def describe(self) -> str:
        by = f"block of {self.block[0]}x{self.block[1]}" if self.block else "output" if self.per_channel else "tensor"
        token = "token and group" if self.block else "token"
        how = {"dynamic": f"quantized per {token}", "static": "quantized by the checkpoint's scales"}
        return f"fp8 weights, a scale per {by}; activations {how.get(self.activations, 'not quantized')}"


@dataclass(frozen=True)
class Fp8Config:
    """One scheme for all linear layers but those that are skipped."""

    scheme: Fp8Scheme = Fp8Scheme()
    skipped: tuple[str, ...] = ("lm_head",)  # layers that are not quantized: names, or "re:" and a pattern
    skip_by_part: bool = False  # a name also matches within longer names
    method: str = "fp8"  # quant_method

    def __post_init__(self) -> None:
        for skipped in self.skipped:
            if skipped.startswith("re:"):
                re.compile(skipped[3:])

    def quantizes(self, name: str) -> bool:
        """Whether the linear layer of that name is quantized."""
        for skipped in self.skipped:
            if skipped.startswith("re:"):
                if re.match(skipped[3:], name):
                    return False
            elif skipped == name or (self.skip_by_part and f".{skipped}." in f".{name}."):
                return False
        return True


def parse_fp8_config(stored: dict[str, Any]) -> Fp8Config:
    """A quantization_config of method fp8."""
    with well_formed():
        activations = stored.get("activation_scheme", "dynamic")
        if activations not in ("dynamic", "static"):
            raise unsupported(f"activation_scheme {activations!r}", "dynamic, static")
        if stored.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise unsupported(f"fmt {stored['fmt']!r}", "e4m3")
        block = stored.get("weight_block_size")
        scheme = Fp8Scheme(
            block=None if block is None else tuple(block),
            activations=activations,
            scale_name="weight_scale_inv" if block else "weight_scale",
        )
        skipped = names_in(stored, "ignored_layers") or names_in(stored, "modules_to_not_convert")
        return Fp8Config(scheme, skipped=skipped, skip_by_part=True)
