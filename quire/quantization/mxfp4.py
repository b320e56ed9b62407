"""Checkpoints whose experts are in mxfp4 (gpt-oss)."""

from typing import Any

import torch

from quire.quantization.unquantized import Unquantized


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> Unquantized:
    return Unquantized(f"mxfp4: experts dequantized to {str(dtype).removeprefix('torch.')} while loading")
