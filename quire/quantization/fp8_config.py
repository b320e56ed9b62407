"""Parses a checkpoint's quantization_config for fp8 weights."""

import re
from dataclasses import dataclass
from typing import Any

from quire.config.values import whole_number
from quire.quantization.checkpoint_config import unsupported, well_formed

ONLINE = ("fp8", "fp8_per_tensor")  # applied to an unquantized checkpoint while loading


@dataclass(frozen=True)
class Fp8Config:
    """Weights in e4m3 with float32 scales; activations quantized per token, or by a fixed scale of the checkpoint."""

    online: bool = False  # the checkpoint is unquantized: quantize while loading
    per_channel: bool = False  # a scale per output; else one per tensor of the checkpoint
    block: tuple[int, int] | None = None  # a scale per block of the weight
    static_activations: bool = False
    scale_name: str = "weight_scale"
    skipped: tuple[str, ...] = ("lm_head",)  # layers that are not quantized: names, or "re:" and a pattern
    skip_by_part: bool = False  # a name also matches within longer names

    def __post_init__(self) -> None:
        if self.block is not None:
            for size in self.block:
                whole_number("a block size of weights (quantization_config)", size)
            if len(self.block) != 2:
                raise unsupported(f"blocks of {len(self.block)} dimensions", "[rows, columns]")
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
    """A quantization_config of method fp8 or compressed-tensors."""
    parse = _parse_fp8 if stored.get("quant_method") == "fp8" else _parse_compressed_tensors
    with well_formed():
        return parse(stored)


def _parse_fp8(stored: dict[str, Any]) -> Fp8Config:
    scheme = stored.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise unsupported(f"activation_scheme {scheme!r}", "dynamic, static")
    if stored.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"fmt {stored['fmt']!r}", "e4m3")
    block = stored.get("weight_block_size")
    if block is not None and (len(block) != 2 or scheme == "static"):
        raise unsupported(f"weight_block_size {block} with {scheme} activations", "[rows, columns], dynamic")
    return Fp8Config(
        block=tuple(block) if block else None,
        static_activations=scheme == "static",
        scale_name="weight_scale_inv" if block else "weight_scale",
        skipped=tuple(stored.get("ignored_layers") or stored.get("modules_to_not_convert") or ()),
        skip_by_part=True,
    )


def _parse_compressed_tensors(stored: dict[str, Any]) -> Fp8Config:
    kind = stored.get("format")
    if kind not in ("float-quantized", "naive-quantized"):
        raise unsupported(f"compressed-tensors format {kind!r}", "float-quantized")
    groups = list((stored.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        targets = [group.get("targets") for group in groups]
        raise unsupported(f"config_groups for {targets}", "one group for ['Linear']")
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    for what, args in (("weights", weights), ("input_activations", inputs)):
        if args.get("type") != "float" or args.get("num_bits") != 8 or not args.get("symmetric", True):
            raise unsupported(f"{what} {args.get('num_bits')}-bit {args.get('type')}", "8-bit float, symmetric (W8A8)")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("channel", "tensor", "block") or (strategy == "block" and not block):
        raise unsupported(f"weights by {strategy}", "channel, tensor, block with block_structure")
    dynamic = bool(inputs.get("dynamic"))
    wanted = ("token", "group") if strategy == "block" else ("token",) if dynamic else ("tensor",)
    if inputs.get("strategy") not in wanted:
        raise unsupported(
            f"{'dynamic' if dynamic else 'static'} input_activations by {inputs.get('strategy')}",
            "dynamic by token, static by tensor",
        )
    return Fp8Config(
        per_channel=strategy == "channel",
        block=tuple(block) if block and strategy == "block" else None,
        static_activations=not dynamic,
        skipped=tuple(stored.get("ignore") or ()),
    )
