"""fp8 checkpoints, and fp8 while loading: the method of each linear layer."""

from typing import Any

import torch

from quire.quantization.base import LinearMethod, VocabMethod
from quire.quantization.fp8_blocks import GroupedFp8LinearMethod
from quire.quantization.fp8_config import Fp8Config, Fp8Scheme, parse_fp8_config
from quire.quantization.fp8_dequantized import DequantizedFp8LinearMethod
from quire.quantization.fp8_linear import CheckpointFp8LinearMethod, OnlineFp8LinearMethod
from quire.quantization.platform import has_fp8

# Scales of queries, of weights of attention and of outputs, which are not used.
UNUSED_SCALES = (
    "model.layers.{i}.self_attn.q_scale",
    "model.layers.{i}.self_attn.prob_scale",
    "model.layers.{i}.self_attn.attn.q_scale",
    "model.layers.{i}.self_attn.attn.prob_scale",
    "model.layers.{i}.self_attn.q_proj.q_scale",
    "model.layers.{i}.self_attn.{p}.output_scale",
    "model.layers.{i}.mlp.{p}.output_scale",
)


def fp8_linear_method(
    scheme: Fp8Scheme, dtype: torch.dtype, device: torch.device, dequantize: bool, module: str
) -> LinearMethod:
    """For weights of the checkpoint: multiplied as stored where the device can."""
    if not computes_in_fp8(dtype, device, dequantize):
        return DequantizedFp8LinearMethod(scheme, module)
    if scheme.block is None and scheme.activations != "none":
        return CheckpointFp8LinearMethod(scheme, module)
    return GroupedFp8LinearMethod(scheme, module)


def computes_in_fp8(dtype: torch.dtype, device: torch.device, dequantize: bool) -> bool:
    return has_fp8(device) and dtype is not torch.float32 and not dequantize


def describe_fp8(scheme: Fp8Scheme, dtype: torch.dtype, device: torch.device, dequantize: bool) -> str:
    if computes_in_fp8(dtype, device, dequantize):
        return scheme.describe()
    compute = str(dtype).removeprefix("torch.")
    where = "a CPU" if device.type == "cpu" else "this GPU"
    reason = f"no fp8 arithmetic in {compute}" if has_fp8(device) else f"{where} has no fp8 arithmetic"
    return f"fp8 weights dequantized to {compute} while loading ({'as requested' if dequantize else reason})"


class OnlineFp8Quantization:
    """All linear layers but the head are quantized while loading."""

    ignored: tuple[str, ...] = UNUSED_SCALES

    def __init__(self, per_channel: bool, dtype: torch.dtype) -> None:
        self.per_channel, self.dtype = per_channel, dtype

    def linear_method(self, name: str) -> LinearMethod | None:
        return OnlineFp8LinearMethod(self.per_channel) if name != "lm_head" else None

    def vocab_method(self) -> VocabMethod | None:
        return None

    def describe(self) -> str:
        scales, compute = "output" if self.per_channel else "tensor", str(self.dtype).removeprefix("torch.")
        return (
            f"fp8: weights quantized while loading, a scale per {scales}; activations quantized per token; "
            f"head in {compute}"
        )


class Fp8Checkpoint:
    """fp8 for all linear layers except the head and those that the checkpoint excludes."""

    ignored: tuple[str, ...] = UNUSED_SCALES

    def __init__(self, config: Fp8Config, dtype: torch.dtype, device: torch.device, dequantize: bool = False) -> None:
        self.config, self.place = config, (dtype, device, dequantize)

    def linear_method(self, name: str) -> LinearMethod | None:
        return fp8_linear_method(self.config.scheme, *self.place, name) if self.config.quantizes(name) else None

    def vocab_method(self) -> VocabMethod | None:
        return None

    def describe(self) -> str:
        compute = str(self.place[0]).removeprefix("torch.")
        return f"{self.config.method}: {describe_fp8(self.config.scheme, *self.place)}; head in {compute}"


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> Fp8Checkpoint:
    return Fp8Checkpoint(parse_fp8_config(stored), dtype, device, dequantize)
