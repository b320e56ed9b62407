"""ModelOpt checkpoints: fp8 with a scale per tensor for weights and activations, or per output and token; NVFP4."""

import fnmatch
from collections.abc import Callable
from typing import Any

import torch

from quire.quantization.base import Quantization
from quire.quantization.checkpoint_config import names_in, unsupported, well_formed
from quire.quantization.fp4_config import ModelOptFp4
from quire.quantization.fp8 import Fp8Checkpoint
from quire.quantization.fp8_config import Fp8Config, Fp8Scheme

# From the patterns of excluded modules, the compute dtype, the device and whether to dequantize.
Factory = Callable[[tuple[str, ...], torch.dtype, torch.device, bool], Quantization]


def _fp8(scheme: Fp8Scheme) -> Factory:
    def make(excluded: tuple[str, ...], dtype: torch.dtype, device: torch.device, dequantize: bool) -> Quantization:
        return Fp8Checkpoint(Fp8Config(scheme, skipped=excluded, method="modelopt"), dtype, device, dequantize)

    return make


ALGORITHMS: dict[str, Factory] = {
    "FP8": _fp8(Fp8Scheme(activations="static")),
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8(Fp8Scheme(per_channel=True)),
    "NVFP4": ModelOptFp4,
}


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> Quantization:
    """`stored`: quantization_config, or the "quantization" of hf_quant_config.json."""
    with well_formed():
        stored = stored.get("quantization") or stored
        algorithm = str(stored.get("quant_algo"))
        make = ALGORITHMS.get(algorithm.upper())
        if make is None:
            raise unsupported(f"quant_algo {algorithm!r}", ", ".join(ALGORITHMS))
        named = names_in(stored, "exclude_modules") or names_in(stored, "ignore")
        return make(tuple(_pattern(name) for name in named), dtype, device, dequantize)


def _pattern(module: str) -> str:
    """A module with wildcards as a regular expression; what is inside an excluded module is excluded too."""
    return f"re:{fnmatch.translate(module)}|{fnmatch.translate(f'{module}.*')}"
