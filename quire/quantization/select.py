"""Chooses the quantization from the user's option and the checkpoint."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from quire.kernels.int_linear import HALF
from quire.kernels.native import quantized
from quire.quantization.base import Quantization
from quire.quantization.block_quantized import GGUFQuantization, IntQuantization, panels_obstacle
from quire.quantization.fp8_config import ONLINE
from quire.quantization.gguf_gpu import GGUFPackedQuantization
from quire.quantization.int_online import OnlineIntQuantization
from quire.quantization.platform import MIN_CAPABILITY, has_fp8
from quire.quantization.unquantized import UNQUANTIZED, Unquantized

GGUF, DEQUANTIZED = "gguf", "dequantized"
INT_BITS = {"int8": 8, "int4": 4}
INT8_PER_CHANNEL = "int8_per_channel"
COMPRESSED, BITSANDBYTES = "compressed-tensors", "bitsandbytes"
# By quant_method, the module in this package that serves it with `quantization(stored, dtype, device, dequantize)`,
# imported when a checkpoint needs it.
FORMATS = {
    "fp8": "fp8",
    COMPRESSED: "compressed_tensors",
    "gptq": "gptq",
    "awq": "awq",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt",
    BITSANDBYTES: "bitsandbytes",
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
    if stored is not None:
        return _checkpoint_quantization(requested, stored, dtype, device)
    if is_gguf and requested in (None, GGUF, DEQUANTIZED):
        return _gguf_quantization(requested, dtype, device)
    if requested is None:
        return UNQUANTIZED
    if requested in INT_BITS:
        return _int_quantization(requested, dtype, device, is_gguf)
    if requested == INT8_PER_CHANNEL:
        return _int8_per_channel(dtype, device, is_gguf)
    if requested in ONLINE:
        return _fp8_quantization(requested, dtype, device)
    if is_gguf:
        raise _not_for_gguf(requested)
    if requested == BITSANDBYTES:
        from quire.quantization.bitsandbytes import online_quantization

        return online_quantization(dtype, device)
    raise ValueError(
        f"quantization is {requested!r}, but the checkpoint is not quantized; "
        f"allowed: {', '.join(INT_BITS)}, on a GPU also {', '.join((*ONLINE, BITSANDBYTES))}, "
        f"on a CPU also {INT8_PER_CHANNEL}"
    )


def _not_for_gguf(requested: str) -> ValueError:
    return ValueError(
        f"quantization is {requested!r}, but the checkpoint is a GGUF; allowed: {GGUF} (its weights as stored), "
        f"{DEQUANTIZED}"
    )


def _checkpoint_quantization(
    requested: str | None, stored: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Quantization:
    method = stored.get("quant_method", COMPRESSED)
    if not isinstance(method, str):
        raise ValueError(f"the checkpoint's quantization_config has quant_method {method!r}; it must be a name")
    if method in _registered and requested in (None, method):
        return _registered[method](stored, dtype, device)
    if method not in FORMATS and method not in _registered:
        raise ValueError(
            f"the checkpoint is quantized by {method!r} (quantization_config), which is not supported; "
            f"supported: {', '.join(dict.fromkeys((*FORMATS, *_registered)))}, or an unquantized checkpoint"
        )
    if requested not in (None, method, DEQUANTIZED) or method not in FORMATS:
        raise ValueError(
            f"quantization is {requested!r}, but the checkpoint is quantized by {method!r}; leave it out, or use "
            f"{DEQUANTIZED}"
        )
    module = import_module(f"quire.quantization.{FORMATS[method]}")
    chosen: Quantization = module.quantization(stored, dtype, device, requested == DEQUANTIZED)
    return chosen


def _fp8_quantization(requested: str, dtype: torch.dtype, device: torch.device) -> Quantization:
    from quire.quantization.fp8 import OnlineFp8Quantization

    if not has_fp8(device):
        where = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise ValueError(
            f"quantization {requested!r} needs a GPU of compute capability {'.'.join(map(str, MIN_CAPABILITY))} or "
            f"later (Ada, Hopper); {where} has no fp8 arithmetic. Leave it out to run in {dtype}"
        )
    if dtype is torch.float32:
        raise ValueError(f"quantization {requested!r} computes in bfloat16 or float16; dtype is float32")
    return OnlineFp8Quantization(requested == "fp8", dtype)


def _gguf_quantization(requested: str | None, dtype: torch.dtype, device: torch.device) -> Quantization:
    compute = str(dtype).removeprefix("torch.")
    on_gpu = device.type == "cuda"
    if on_gpu:
        obstacle = None if dtype in HALF else f"dtype is {compute}, and a GPU has kernels for bfloat16 and float16 only"
    else:
        obstacle = panels_obstacle(dtype, device)
    if requested == GGUF and obstacle:
        raise ValueError(f"quantization 'gguf' keeps weights quantized, but {obstacle}; allowed here: {DEQUANTIZED}")
    if requested is None and obstacle is None and not on_gpu and not quantized.is_fast():
        obstacle = "this processor has no instructions for quantized products"
    if requested == DEQUANTIZED or obstacle:
        why = "as requested" if requested == DEQUANTIZED else obstacle
        return Unquantized(f"gguf: weights dequantized to {compute} while loading ({why})")
    return GGUFPackedQuantization(dtype) if on_gpu else GGUFQuantization(dtype)


def _int_quantization(requested: str, dtype: torch.dtype, device: torch.device, is_gguf: bool) -> Quantization:
    if is_gguf:
        raise _not_for_gguf(requested)
    if device.type == "cuda":
        if dtype not in HALF:
            raise ValueError(f"quantization {requested!r} computes in bfloat16 or float16 on a GPU; dtype is {dtype}")
        return OnlineIntQuantization(INT_BITS[requested], dtype)
    obstacle = panels_obstacle(dtype, device)
    if obstacle:
        raise ValueError(f"quantization {requested!r} is not possible: {obstacle}; leave it out to run in {dtype}")
    return IntQuantization(INT_BITS[requested])


def _int8_per_channel(dtype: torch.dtype, device: torch.device, is_gguf: bool) -> Quantization:
    from quire.quantization.int8_channel import Int8ChannelQuantization

    if is_gguf:
        raise _not_for_gguf(INT8_PER_CHANNEL)
    obstacle = panels_obstacle(dtype, device)
    if obstacle:
        raise ValueError(
            f"quantization {INT8_PER_CHANNEL!r} is for CPUs, and not possible here: {obstacle}; "
            f"allowed on a GPU: {', '.join((*INT_BITS, *ONLINE, BITSANDBYTES))}"
        )
    return Int8ChannelQuantization(dtype)
