"""From what the user asked and what the checkpoint says to a quantization."""

from typing import Any

import torch

from quire.quantization.base import Quantization
from quire.quantization.fp8 import MIN_CAPABILITY, Fp8Quantization
from quire.quantization.fp8_config import FP8_METHODS, ONLINE, Fp8Config, parse_fp8_config
from quire.quantization.unquantized import UNQUANTIZED


def choose_quantization(
    asked: str | None, hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Quantization:
    """`asked`: the option `quantization`; None takes the checkpoint as it is."""
    stored = hf_config.get("quantization_config") or hf_config.get("compression_config")
    method = stored.get("quant_method", "compressed-tensors") if stored else None
    if stored is not None and method not in FP8_METHODS:
        raise ValueError(
            f"the checkpoint is quantized by {method!r} (quantization_config), which is not supported; "
            f"supported: {', '.join(FP8_METHODS)}, or an unquantized checkpoint"
        )
    if stored is not None:
        if asked is not None and asked != method:
            raise ValueError(f"quantization is {asked!r}, but the checkpoint is quantized by {method!r}; leave it out")
        config = parse_fp8_config(stored)
        native = config.block is None and _has_fp8(device) and dtype is not torch.float32
        return Fp8Quantization(config, native, dtype)
    if asked is None:
        return UNQUANTIZED
    if asked not in ONLINE:
        raise ValueError(
            f"quantization is {asked!r}, but the checkpoint is not quantized; allowed: {', '.join(ONLINE)}"
        )
    if not _has_fp8(device):
        where = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise ValueError(
            f"quantization {asked!r} needs a GPU of compute capability {'.'.join(map(str, MIN_CAPABILITY))} or later "
            f"(Ada, Hopper); {where} has no fp8 arithmetic. Leave it out to run in {dtype}"
        )
    if dtype is torch.float32:
        raise ValueError(f"quantization {asked!r} computes in bfloat16 or float16; dtype is float32")
    return Fp8Quantization(Fp8Config(online=True, per_channel=asked == "fp8"), native=True, dtype=dtype)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
