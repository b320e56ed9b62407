"""Checkpoints of fp8 weights in every layout of scales, written block by block, and the same weights unquantized."""

from typing import Literal

import torch

from tests.quantization.int_checkpoints import Format

FP8 = torch.float8_e4m3fn
Layout = Literal["tensor", "channel"] | tuple[int, int]
INPUT_SCALE = 0.05


def quantize(weight: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight in fp8, its scales as stored, and what they mean."""
    outputs, inputs = weight.shape
    rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs)}.get(layout, layout)  # type: ignore[arg-type]
    scales = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    q, meant = torch.zeros(weight.shape, dtype=FP8), torch.zeros(weight.shape)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].float().abs().max() / 448
            q[block] = (weight[block].float() / scales[i, j]).to(FP8)
            meant[block] = q[block].float() * scales[i, j]
    return q, scales, meant


def fp8(layout: Layout, config: dict, name: str = "weight_scale", static: bool = False) -> Format:
    def write(module, weight):
        q, scales, meant = quantize(weight, layout)
        stored = {"weight": q, name: scales.view(()) if layout == "tensor" else scales}
        return stored | ({"input_scale": torch.tensor(INPUT_SCALE)} if static else {}), meant

    return Format(config, write)


def compressed_fp8(layout: Layout, inputs: str | None = "token", **differences: object) -> Format:
    """compressed-tensors; inputs: None for W8A16, else their strategy, of which that by tensor is static."""
    strategy = layout if isinstance(layout, str) else "block"
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if not isinstance(layout, str):
        weights["block_structure"] = list(layout)
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": inputs, "dynamic": inputs != "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group | differences},
        "ignore": ["lm_head"],
    }
    return fp8(layout, config, static=inputs == "tensor")


def block_fp8(layout: tuple[int, int] = (32, 32)) -> Format:
    """As DeepSeek stores it."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(layout)}
    return fp8(layout, config | {"modules_to_not_convert": ["lm_head"]}, "weight_scale_inv")


def modelopt_fp8() -> Format:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return fp8("tensor", config | {"kv_cache_quant_algo": "FP8"}, static=True)
