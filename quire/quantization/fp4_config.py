"""4-bit floats in a quantization_config: of compressed-tensors (NVFP4, MXFP4) and of ModelOpt (NVFP4)."""

import re
from typing import Any

import torch

from quire.quantization.base import LinearMethod
from quire.quantization.checkpoint_config import unsupported
from quire.quantization.fp4 import MXFP4_GROUP, NVFP4_GROUP, Fp4Scheme
from quire.quantization.fp4_linear import fp4_linear_method
from quire.quantization.fp8 import UNUSED_SCALES
from quire.quantization.int_kernels import choose_int_kernel

# By format of compressed-tensors: the scheme, and how weights and activations are grouped.
COMPRESSED = {
    "nvfp4-pack-quantized": (
        Fp4Scheme(global_scale="weight_global_scale", input_scale="input_global_scale", reciprocal=True),
        ("tensor_group", NVFP4_GROUP),
    ),
    "mxfp4-pack-quantized": (Fp4Scheme(), ("group", MXFP4_GROUP)),
}
MODELOPT = Fp4Scheme("weight", "weight_scale_2", "input_scale", rounds_inputs=True)


def fp4_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str | None) -> Fp4Scheme:
    """Of a group's `weights` and `input_activations`, stored in format `kind` of compressed-tensors."""
    if kind not in COMPRESSED:
        raise unsupported(f"compressed-tensors format {kind!r} for 4-bit floats", ", ".join(COMPRESSED))
    scheme, (strategy, group_size) = COMPRESSED[kind]
    for what, args in (("weights", weights), ("input_activations", inputs)):
        if args is None:
            continue
        found = (args.get("type"), args.get("num_bits"), args.get("strategy"), args.get("group_size"))
        if found != ("float", 4, strategy, group_size) or not args.get("symmetric", True):
            raise unsupported(
                f"{what} of {found[1]}-bit {found[0]} by {found[2]} of {found[3]} in {kind}",
                f"4-bit float, symmetric, by {strategy} of {group_size}; input_activations may be missing (W4A16)",
            )
    if inputs is None:
        return scheme
    if not inputs.get("dynamic"):
        raise unsupported(f"static input_activations in {kind}", "scales of groups computed from them (dynamic)")
    return Fp4Scheme(scheme.weight, scheme.global_scale, scheme.input_scale, scheme.reciprocal, rounds_inputs=True)


class ModelOptFp4:
    """NVFP4 for all linear layers except those that the checkpoint excludes."""

    ignored: tuple[str, ...] = UNUSED_SCALES

    def __init__(self, excluded: tuple[str, ...], dtype: torch.dtype, device: torch.device, dequantize: bool) -> None:
        """`excluded`: regular expressions behind "re:"."""
        self.excluded = [re.compile(pattern.removeprefix("re:")) for pattern in excluded]
        self.kernel = choose_int_kernel(dtype, device, dequantize, group_size=MODELOPT.group_size)

    def linear_method(self, name: str) -> LinearMethod | None:
        if any(pattern.match(name) for pattern in self.excluded):
            return None
        return fp4_linear_method(MODELOPT, self.kernel, name)

    def head_method(self) -> LinearMethod | None:
        return self.linear_method("lm_head")

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        return f"modelopt: {MODELOPT.describe()}; {self.kernel.describe()}"
