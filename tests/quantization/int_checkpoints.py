"""Checkpoints of integers, packed as the formats define it, and the same weights unquantized.

Written number by number, unlike the decoders under test.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in an int32, from the lowest bits on


@dataclass
class Quantized:
    """w = scales[n, g] * (codes[n, k] - zeros[n, g]), g = group_of[k]."""

    codes: np.ndarray  # [outputs, inputs], 0 to 2 ** bits - 1
    scales: torch.Tensor  # [outputs, groups], float16 or bfloat16
    zeros: np.ndarray  # [outputs, groups]
    group_of: np.ndarray  # [inputs]

    def dequantized(self) -> torch.Tensor:
        difference = self.codes.astype(np.float32) - self.zeros[:, self.group_of].astype(np.float32)
        return torch.from_numpy(difference) * self.scales.float()[:, self.group_of]


def quantize(
    weight: torch.Tensor, bits: int = 4, group_size: int = 32, sym: bool = True, shuffled: bool = False,
    scale_type: torch.dtype = torch.float16,
) -> Quantized:  # fmt: skip
    """Rounded to the nearest; shuffled: the inputs of a group are anywhere, as with desc_act."""
    w = weight.float().numpy()
    outputs, inputs = w.shape
    size = inputs if group_size < 0 else group_size
    group_of = np.arange(inputs) // size
    if shuffled:
        group_of = np.random.default_rng(inputs).permutation(group_of)
    top = 2**bits - 1
    scales, zeros = np.zeros((2, outputs, inputs // size), np.float32)
    for g in range(inputs // size):
        part = w[:, group_of == g]
        if sym:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / (top // 2), 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = np.round(-low / scales[:, g]).clip(1 if bits == 4 else 0, top)
    kept = torch.from_numpy(scales).to(scale_type)
    rounded = np.round(w / kept.float().numpy()[:, group_of] + zeros[:, group_of])
    return Quantized(rounded.clip(0, top).astype(np.int64), kept, zeros.astype(np.int64), group_of)


def pack(numbers: np.ndarray, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Along a dimension into int32, the first number in the lowest bits; or those of `order`."""
    each = 32 // bits
    numbers = np.moveaxis(numbers, dim, 0).astype(np.uint64)
    padded = np.concatenate([numbers, np.zeros((-len(numbers) % each, *numbers.shape[1:]), np.uint64)])
    words = np.zeros((len(padded) // each, *padded.shape[1:]), np.uint64)
    for word in range(len(words)):
        for place, number in enumerate(order or range(each)):
            words[word] |= padded[word * each + number] << np.uint64(bits * place)
    packed = np.moveaxis(words, 0, dim).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(packed))


def gptq_tensors(q: Quantized, bits: int, v2: bool = False) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(q.codes.T, bits, 0),
        "scales": q.scales.t().contiguous(),
        "qzeros": pack((q.zeros if v2 else q.zeros - 1).T, bits, 1),
        "g_idx": torch.from_numpy(q.group_of).int(),
    }


def awq_tensors(q: Quantized) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(q.codes.T, 4, 1, AWQ_ORDER),
        "scales": q.scales.t().contiguous(),
        "qzeros": pack(q.zeros.T, 4, 1, AWQ_ORDER),
    }


def packed_tensors(q: Quantized, bits: int, sym: bool, shuffled: bool = False) -> dict[str, torch.Tensor]:
    """compressed-tensors, pack-quantized."""
    found = {
        "weight_packed": pack(q.codes, bits, 1),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor(q.codes.shape),
    }
    if not sym:
        found["weight_zero_point"] = pack(q.zeros, bits, 0)
    if shuffled:
        found["weight_g_idx"] = torch.from_numpy(q.group_of).int()
    return found


def plain_tensors(q: Quantized, bits: int, sym: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors, int-quantized."""
    middle = 2 ** (bits - 1)
    found = {"weight": torch.from_numpy(q.codes - middle).to(torch.int8), "weight_scale": q.scales}
    if not sym:
        found["weight_zero_point"] = torch.from_numpy(q.zeros - middle).to(torch.int8)
    return found


def group(bits: int = 4, group_size: int | None = 32, sym: bool = True, **differences: object) -> dict:
    """Of compressed-tensors' config_groups."""
    strategy = "channel" if group_size is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "group_size": group_size}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None} | differences


def compressed(*groups: dict, kind: str = "pack-quantized", **differences: object) -> dict:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    base = {"quant_method": "compressed-tensors", "format": kind, "config_groups": named, "ignore": ["lm_head"]}
    return base | differences


Writer = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor] | None]


@dataclass
class Format:
    """A quantization_config, and what a layer becomes under it: `tensors` by name and the weight that they mean."""

    config: dict
    write: Writer


def with_config(made: "Format", **differences: object) -> "Format":
    return Format(made.config | differences, made.write)


def gptq(
    bits: int = 4, group_size: int = 32, sym: bool = True, shuffled: bool = False, v2: bool = False,
    scale_type: torch.dtype = torch.float16, **differences: object,
) -> Format:  # fmt: skip
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": shuffled,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip

    def write(name, weight):
        q = quantize(weight, bits, group_size, sym, shuffled, scale_type)
        return gptq_tensors(q, bits, v2), q.dequantized()

    return Format(config | differences, write)


def awq(group_size: int = 32, **differences: object) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}

    def write(name, weight):
        q = quantize(weight, 4, group_size, sym=False)
        return awq_tensors(q), q.dequantized()

    return Format(config | differences, write)


def w4a16(bits: int = 4, group_size: int = 32, sym: bool = True, shuffled: bool = False) -> Format:
    def write(name, weight):
        q = quantize(weight, bits, group_size, sym, shuffled, torch.bfloat16)
        return packed_tensors(q, bits, sym, shuffled), q.dequantized()

    return Format(compressed(group(bits, None if group_size < 0 else group_size, sym)), write)


def w8a8(sym: bool = True, static: bool = False) -> Format:
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor" if static else "token"}

    def write(name, weight):
        q = quantize(weight, 8, -1, sym, scale_type=torch.bfloat16)
        extra = {"input_scale": torch.tensor([0.02])} if static else {}
        return plain_tensors(q, 8, sym) | extra, q.dequantized()

    each = group(8, None, sym, input_activations=inputs | {"dynamic": not static})
    return Format(compressed(each, kind="int-quantized"), write)


def is_linear(name: str) -> bool:
    layer = name.removesuffix(".weight")
    return name != layer and (layer.endswith(("_proj", "_with_mqa")) or layer.split(".")[-1] in ("w1", "w2", "w3"))


def save_checkpoints(family: str, folder: Path, made: Format, **overrides: object) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the same weights unquantized; `write` gives None for a layer that stays."""
    ours, plain = folder / "quantized", folder / "unquantized"
    save_tiny(family, ours, **overrides)
    plain.mkdir()
    (plain / "config.json").write_text((ours / "config.json").read_text())
    save_file(quantize_checkpoint(ours, made), plain / "model.safetensors")
    return ours, plain


def quantize_checkpoint(folder: Path, made: Format) -> dict[str, torch.Tensor]:
    """In place. What its weights mean now, unquantized."""
    weights, stored = load_file(folder / "model.safetensors"), {}
    for name, data in list(weights.items()):
        layer = name.removesuffix(".weight")
        found = made.write(layer, data) if is_linear(name) or layer == "lm_head" else None
        if found is None:
            stored[name] = data
            continue
        tensors, weights[name] = found
        stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": made.config}))
    save_file(stored, folder / "model.safetensors")
    return weights
