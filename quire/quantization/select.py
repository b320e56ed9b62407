"""Chooses the quantization from the user's option and the checkpoint."""

from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.int_linear import HALF
from quire.kernels.native import quantized
from quire.quantization.awq import AWQConfig
from quire.quantization.base import Quantization
from quire.quantization.block_quantized import GGUFQuantization, IntQuantization, panels_obstacle
from quire.quantization.compressed_tensors import CompressedConfig, has_integers
from quire.quantization.fp8 import MIN_CAPABILITY, Fp8Quantization
from quire.quantization.fp8_config import FP8_METHODS, ONLINE, Fp8Config, parse_fp8_config
from quire.quantization.gptq import GPTQConfig
from quire.quantization.int_kernels import choose_int_kernel
from quire.quantization.int_linear import IntCheckpoint, IntConfig
from quire.quantization.int_online import OnlineIntQuantization
from quire.quantization.unquantized import UNQUANTIZED, Unquantized

GGUF, DEQUANTIZED, MXFP4 = "gguf", "dequantized", "mxfp4"
INT_BITS = {"int8": 8, "int4": 4}
COMPRESSED = "compressed-tensors"
INT_FORMATS: dict[str, Callable[[dict[str, Any]], IntConfig]] = {
    "gptq": GPTQConfig.parse,
    "awq": AWQConfig.parse,
    COMPRESSED: CompressedConfig.parse,
}

# From the checkpoint's quantization_config, the compute dtype and the device.
Factory = Callable[[dict[str, Any], torch.dtype, torch.device], Quantization]
_registered: dict[str, Factory] = {}


def register_quantization(quant_method: str, factory: Factory) -> None:
    """Serve checkpoints whose quantization_config has this quant_method, also one of ours; for plugins."""
    _registered[quant_method] = factory


def choose_quantization(
    requested: str | None, hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device, is_gguf: bool = False
) -> Quantization:
    """`requested`: the option `quantization`; None: as the checkpoint is stored."""
    stored = hf_config.get("quantization_config") or hf_config.get("compression_config")
    method = stored.get("quant_method", COMPRESSED) if stored else None
    if method in _registered and stored is not None and requested in (None, method):
        return _registered[method](stored, dtype, device)
    is_int = stored is not None and method in INT_FORMATS and (method != COMPRESSED or has_integers(stored))
    if is_int and requested in (None, method, DEQUANTIZED):
        assert stored is not None and method is not None
        kernel = choose_int_kernel(dtype, device, dequantize=requested == DEQUANTIZED)
        return IntCheckpoint(INT_FORMATS[method](stored), kernel)
    if method == MXFP4 and requested in (None, MXFP4):
        return Unquantized(f"mxfp4: experts dequantized to {str(dtype).removeprefix('torch.')} while loading")
    supported = tuple(dict.fromkeys((*FP8_METHODS, *INT_FORMATS, MXFP4, *_registered)))
    if stored is not None and method not in supported:
        raise ValueError(
            f"the checkpoint is quantized by {method!r} (quantization_config), which is not supported; "
            f"supported: {', '.join(supported)}, or an unquantized checkpoint"
        )
    if stored is not None:
        if requested is not None and requested != method:
            instead = f"leave it out, or use {DEQUANTIZED}" if is_int else "leave it out"
            raise ValueError(f"quantization is {requested!r}, but the checkpoint is quantized by {method!r}; {instead}")
        config = parse_fp8_config(stored)
        computes_in_fp8 = config.block is None and _has_fp8(device) and dtype is not torch.float32
        return Fp8Quantization(config, computes_in_fp8, dtype)
    if is_gguf and requested in (None, GGUF, DEQUANTIZED):
        return _gguf_quantization(requested, dtype, device)
    if requested is None:
        return UNQUANTIZED
    if requested in INT_BITS:
        return _int_quantization(requested, dtype, device, is_gguf)
    if requested not in ONLINE:
        raise ValueError(
            f"quantization is {requested!r}, but the checkpoint is not quantized; "
            f"allowed: {', '.join((*ONLINE, *INT_BITS))}"
        )
    if not _has_fp8(device):
        where = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise ValueError(
            f"quantization {requested!r} needs a GPU of compute capability {'.'.join(map(str, MIN_CAPABILITY))} or "
            f"later (Ada, Hopper); {where} has no fp8 arithmetic. Leave it out to run in {dtype}"
        )
    if dtype is torch.float32:
        raise ValueError(f"quantization {requested!r} computes in bfloat16 or float16; dtype is float32")
    return Fp8Quantization(Fp8Config(online=True, per_channel=requested == "fp8"), computes_in_fp8=True, dtype=dtype)


def _gguf_quantization(requested: str | None, dtype: torch.dtype, device: torch.device) -> Quantization:
    compute = str(dtype).removeprefix("torch.")
    obstacle = panels_obstacle(dtype, device)
    if requested == GGUF and obstacle:
        raise ValueError(f"quantization 'gguf' keeps weights quantized, but {obstacle}; allowed here: {DEQUANTIZED}")
    if requested is None and obstacle is None and not quantized.is_fast():
        obstacle = "this processor has no instructions for quantized products"
    if requested == DEQUANTIZED or obstacle:
        why = "as requested" if requested == DEQUANTIZED else obstacle
        return Unquantized(f"gguf: weights dequantized to {compute} while loading ({why})")
    return GGUFQuantization(dtype)


def _int_quantization(requested: str, dtype: torch.dtype, device: torch.device, is_gguf: bool) -> Quantization:
    if is_gguf:
        raise ValueError(
            f"quantization is {requested!r}, but the checkpoint is a GGUF; allowed: {GGUF} (its weights as stored), "
            f"{DEQUANTIZED}"
        )
    if device.type == "cuda":
        if dtype not in HALF:
            raise ValueError(f"quantization {requested!r} computes in bfloat16 or float16 on a GPU; dtype is {dtype}")
        return OnlineIntQuantization(INT_BITS[requested], dtype)
    obstacle = panels_obstacle(dtype, device)
    if obstacle:
        raise ValueError(f"quantization {requested!r} is not possible: {obstacle}; leave it out to run in {dtype}")
    return IntQuantization(INT_BITS[requested])


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
