"""Checkpoints whose experts are in mxfp4 (gpt-oss)."""

from typing import Any

import torch

from quire.kernels.int_linear import HALF
from quire.layers.mxfp4_experts import Mxfp4Experts
from quire.quantization.unquantized import Unquantized


class Mxfp4(Unquantized):
    """Linear layers are not quantized; experts stay as stored."""

    def fused_experts(self) -> type[Mxfp4Experts]:
        return Mxfp4Experts


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> Unquantized:
    compute = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and dtype in HALF and not dequantize:
        return Mxfp4(f"mxfp4: experts stay at 4 bits; activations and products in {compute}")
    why = "as requested" if dequantize else "kernels of 4 bits need a GPU and bfloat16 or float16"
    return Unquantized(f"mxfp4: experts dequantized to {compute} while loading ({why})")
