"""compressed-tensors checkpoints: groups of modules, each with a scheme of its own, integers, fp8 or 4-bit floats."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire.quantization.base import LinearMethod
from quire.quantization.checkpoint_config import names_in, unsupported, well_formed
from quire.quantization.compressed_int import CompressedScheme, int_scheme
from quire.quantization.fp4 import NVFP4_GROUP, Fp4Scheme
from quire.quantization.fp4_config import fp4_scheme
from quire.quantization.fp4_linear import fp4_linear_method
from quire.quantization.fp8 import UNUSED_SCALES, describe_fp8, fp8_linear_method
from quire.quantization.fp8_config import Fp8Scheme
from quire.quantization.int_kernels import IntKernel, choose_int_kernel
from quire.quantization.int_linear import IntLinearMethod

LINEAR = "Linear"  # the class of all layers that can be quantized
FP8_FORMATS = ("float-quantized", "naive-quantized")

Scheme = CompressedScheme | Fp8Scheme | Fp4Scheme
# From a group's weights, its input_activations and its format.
SchemeParser = Callable[[dict[str, Any], dict[str, Any] | None, str | None], Scheme]


def fp8_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str | None) -> Fp8Scheme:
    if kind not in FP8_FORMATS:
        raise unsupported(f"compressed-tensors format {kind!r} for fp8", ", ".join(FP8_FORMATS))
    for what, args in (("weights", weights), ("input_activations", inputs)):
        if args is None:
            continue
        if args.get("type") != "float" or args.get("num_bits") != 8 or not args.get("symmetric", True):
            found = f"{what} {args.get('num_bits')}-bit {args.get('type')}"
            raise unsupported(found, "8-bit float, symmetric; input_activations may be missing (W8A16)")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("channel", "tensor", "block") or (strategy == "block" and not block):
        raise unsupported(f"weights by {strategy}", "channel, tensor, block with block_structure")
    if isinstance(block, str):
        block = [int(size) if size.isdecimal() else size for size in block.split("x")]
    dynamic = inputs is not None and bool(inputs.get("dynamic"))
    if inputs is not None:
        # With blocks activations are always quantized by token and group: finer than by token alone.
        allowed = ("token", "group") if strategy == "block" else ("token",) if dynamic else ("tensor",)
        if inputs.get("strategy") not in allowed or (strategy == "block" and not dynamic):
            raise unsupported(
                f"{'dynamic' if dynamic else 'static'} input_activations by {inputs.get('strategy')}",
                "dynamic by token (or group, if weights are by block), static by tensor, none",
            )
    return Fp8Scheme(
        per_channel=strategy == "channel",
        block=tuple(block) if block and strategy == "block" else None,
        activations="none" if inputs is None else "dynamic" if dynamic else "static",
    )


# By type and bits of the weights.
PARSERS: dict[tuple[str, int], SchemeParser] = {
    ("int", 4): int_scheme,
    ("int", 8): int_scheme,
    ("float", 8): fp8_scheme,
    ("float", 4): fp4_scheme,
}


@dataclass(frozen=True)
class CompressedConfig:
    """Targets, the most specific first, each with its scheme, and targets that are not quantized. A target is a name,
    're:' and a pattern, or a class."""

    targets: tuple[tuple[str, Scheme], ...]
    skipped: tuple[str, ...]

    @classmethod
    def parse(cls, stored: dict[str, Any]) -> "CompressedConfig":
        with well_formed():
            if stored.get("transform_config"):
                raise unsupported("a transform_config", "checkpoints without")
            if ((stored.get("sparsity_config") or {}).get("format") or "dense") != "dense":
                raise unsupported(f"sparsity_config {stored['sparsity_config']['format']!r}", "dense")
            targets = []
            for group_name, group in stored["config_groups"].items():
                try:
                    scheme = _scheme(group, group.get("format") or stored.get("format"))
                except ValueError as error:
                    raise ValueError(f"{error} (config_groups: {group_name})") from error
                targets += [(_checked_target(target), scheme) for target in names_in(group, "targets")]
            if not targets:
                raise unsupported("config_groups without targets", "one group or more, each with targets")
            targets.sort(key=lambda target: (target[0] == LINEAR, target[0].startswith("re:")))
            return cls(tuple(targets), tuple(map(_checked_target, names_in(stored, "ignore"))))

    def scheme(self, name: str) -> Scheme | None:
        if any(_matches(target, name) for target in self.skipped):
            return None
        return next((scheme for target, scheme in self.targets if _matches(target, name)), None)


def _scheme(group: dict[str, Any], kind: str | None) -> Scheme:
    weights = group["weights"]
    if group.get("output_activations"):
        raise unsupported("output_activations", "weights and input_activations")
    parse = PARSERS.get((weights.get("type", "int"), weights.get("num_bits", 8)))
    if parse is None:
        allowed = ", ".join(f"{bits}-bit {kind}" for kind, bits in PARSERS)
        raise unsupported(f"weights of {weights.get('num_bits')!r} bits, {weights.get('type')!r}", allowed)
    return parse(weights, group.get("input_activations"), kind)


def _checked_target(target: str) -> str:
    if target.startswith("re:"):
        re.compile(target[3:])
    return target


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in (name, LINEAR)


class CompressedTensors:
    """A method for each linear layer, by its scheme."""

    ignored: tuple[str, ...] = UNUSED_SCALES

    def __init__(self, config: CompressedConfig, dtype: torch.dtype, device: torch.device, dequantize: bool) -> None:
        self.config, self.place = config, (dtype, device, dequantize)
        self.kernel = choose_int_kernel(*self.place)
        self.w8a8_kernel = choose_int_kernel(*self.place, int8_inputs=True)
        self.nvfp4_kernel = choose_int_kernel(*self.place, group_size=NVFP4_GROUP)

    def linear_method(self, name: str) -> LinearMethod | None:
        scheme = self.config.scheme(name)
        if scheme is None:
            return None
        if isinstance(scheme, Fp8Scheme):
            return fp8_linear_method(scheme, *self.place, name)
        if isinstance(scheme, Fp4Scheme):
            return fp4_linear_method(scheme, self._kernel(scheme), name)
        # Experts become one weight (layers/linear_experts.py), for kernels that do not quantize rows.
        return IntLinearMethod(scheme, self.kernel if ".experts." in name else self._kernel(scheme), name)

    def head_method(self) -> LinearMethod | None:
        return self.linear_method("lm_head")

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        schemes = [scheme for _, scheme in self.config.targets]
        others = [s for s in schemes if not isinstance(s, Fp8Scheme)]
        kernels = [self._kernel(s).describe() for s in others]
        fp8 = [describe_fp8(s, *self.place) for s in schemes if isinstance(s, Fp8Scheme)]
        parts = dict.fromkeys([*(s.describe() for s in others), *kernels, *fp8])
        return f"compressed-tensors: {'; '.join(parts)}"

    def _kernel(self, scheme: CompressedScheme | Fp4Scheme) -> IntKernel:
        if isinstance(scheme, Fp4Scheme):
            return self.nvfp4_kernel if scheme.group_size == NVFP4_GROUP else self.kernel
        return self.w8a8_kernel if scheme.int8_inputs else self.kernel


def quantization(
    stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool
) -> CompressedTensors:
    return CompressedTensors(CompressedConfig.parse(stored), dtype, device, dequantize)
