"""Tiny DeepSeek-V3 checkpoints: with a prediction layer, in fp8 with a scale per block."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny

LAYERS = 4


def save_with_mtp(folder: Path) -> str:
    """The prediction layer is a copy of the last one, with tensors of its own beside it."""
    save_tiny("deepseek-v3", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(5)
    last, behind = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    tensors |= {name.replace(last, behind): t.clone() for name, t in tensors.items() if name.startswith(last)}
    tensors |= {f"{behind}{name}.weight": torch.rand(64) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    eye = torch.eye(64)
    tensors[f"{behind}eh_proj.weight"] = torch.cat((eye, 0.3 * eye), dim=1) + torch.randn(64, 128) * 0.05
    for copy in ("embed_tokens", "shared_head.head"):
        tensors[f"{behind}{copy}.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def quantize_to_blocks(folder: Path, block: tuple[int, int] = (32, 32)) -> str:
    """In place: fp8 with a scale per block, as DeepSeek publishes it. What is left is in float32 what fp8 holds."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if "_proj" in name and "eh_proj" not in name and weight.dim() == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(weight, block)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448.0
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale


def dequantized_state(folder: Path, block: tuple[int, int] = (32, 32)) -> dict[str, torch.Tensor]:
    """What a checkpoint of quantize_to_blocks means."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, weight = tensors.pop(name), tensors[name.removesuffix("_scale_inv")].float()
        rows, columns = weight.shape
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        tensors[name.removesuffix("_scale_inv")] = weight * scale
    return tensors
