"""How many bytes a model's weights take: from quantization_config, or from quantization while loading."""

from dataclasses import dataclass
from typing import Any

from quire.config.shown import shown
from quire.config.values import whole_number

ONLINE = ("fp8", "int8", "int4")  # --quantization of an unquantized checkpoint
METHODS = ("fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "modelopt", "bitsandbytes")


@dataclass(frozen=True)
class WeightFormat:
    """Of the layers' linears; embeddings, head and router stay in the model's dtype."""

    name: str
    bits: float  # of a weight, with its share of scales and zero points
    group: int = 1  # inputs that share a scale, which ranks do not divide
    fp8_compute: bool = False
    experts_only: bool = False


def dense_format(dtype_bytes: int) -> WeightFormat:
    return WeightFormat("float32" if dtype_bytes == 4 else "16 bits", 8.0 * dtype_bytes)


def gguf_format(file_bytes: int, parameters: int) -> WeightFormat:
    """The average over a file's tensors."""
    return WeightFormat("GGUF", 8.0 * file_bytes / parameters, 32)


def read_format(hf_config: dict[str, Any], requested: str | None, dtype_bytes: int) -> WeightFormat:
    """`requested`: quantization while loading, for a checkpoint that is not quantized."""
    try:
        return _read(hf_config, requested, dtype_bytes)
    except (TypeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"the checkpoint's quantization_config has a value of a wrong type: {error}") from error


def _read(hf_config: dict[str, Any], requested: str | None, dtype_bytes: int) -> WeightFormat:
    stored = hf_config.get("quantization_config") or hf_config.get("compression_config")
    if requested is not None and requested not in ONLINE:
        raise ValueError(
            f"quantization is {requested!r}; allowed: {', '.join(ONLINE)}, or none for the checkpoint's own"
        )
    if stored is None:
        return dense_format(dtype_bytes) if requested is None else _online(requested)
    method = stored.get("quant_method", "compressed-tensors")
    if requested is not None and requested != method:
        raise ValueError(f"quantization is {requested!r}, but the checkpoint is quantized by {method!r}; leave it out")
    if method not in METHODS:
        raise ValueError(f"the checkpoint is quantized by {shown(method)}; allowed: {', '.join(METHODS)}")
    if method == "fp8":
        return WeightFormat("fp8", 8.0, _block(stored.get("weight_block_size")), fp8_compute=True)
    if method == "mxfp4":
        return WeightFormat("mxfp4", 4.25, 32, experts_only=True)
    if method == "bitsandbytes":
        return WeightFormat(method, 8.0) if stored.get("load_in_8bit") else WeightFormat(method, 4.5, 64)
    if method == "modelopt":
        return _modelopt(stored)
    if method == "compressed-tensors":
        return _compressed(stored)
    bits = stored.get("bits") or stored.get("w_bit") or 4
    group = stored.get("group_size") or stored.get("q_group_size") or 128
    return _integers(method, whole_number("bits of quantization_config", bits, maximum=8), group, zeros=True)


def _online(name: str) -> WeightFormat:
    return WeightFormat("fp8", 8.0, fp8_compute=True) if name == "fp8" else _integers(name, int(name[3:]), 128, True)


def _integers(name: str, bits: int, group: Any, zeros: bool) -> WeightFormat:
    """A 16-bit scale for each group; -1 and None: for each output."""
    size = -1 if group is None else whole_number("group_size of quantization_config", group, minimum=-1)
    extra = (16 + bits * zeros) / size if size > 0 else 0.0
    return WeightFormat(name, bits + extra, max(1, size))


def _block(shape: Any) -> int:
    """Inputs of a block of outputs and inputs; 1 without blocks."""
    return whole_number("block size of quantization_config", shape[1]) if shape else 1


def _modelopt(stored: dict[str, Any]) -> WeightFormat:
    algorithm = str(stored.get("quant_algo") or "").upper()
    if algorithm.startswith("FP8"):
        return WeightFormat("modelopt fp8", 8.0, fp8_compute=True)
    if algorithm.startswith("NVFP4"):
        return WeightFormat("modelopt nvfp4", 4.5, 16)
    return _integers(f"modelopt {algorithm.lower()}", 4, stored.get("group_size", 128), zeros=False)


def _compressed(stored: dict[str, Any]) -> WeightFormat:
    groups = stored.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("the checkpoint's quantization_config has no config_groups; compressed-tensors needs them")
    first = next(iter(groups.values()))
    weights = first.get("weights") or {}
    bits = whole_number("num_bits of quantization_config", weights.get("num_bits"), maximum=16)
    name = f"compressed-tensors {weights.get('type', 'int')}{bits}"
    computes = bits == 8 and weights.get("type") == "float" and first.get("input_activations") is not None
    if weights.get("block_structure"):
        return WeightFormat(name, float(bits), _block(weights["block_structure"]), computes)
    if weights.get("group_size") in (None, -1):
        return WeightFormat(name, float(bits), fp8_compute=computes)
    return _integers(name, bits, weights["group_size"], zeros=not weights.get("symmetric", True))
