"""Random adapters in PEFT's format, of all linear layers of a dense decoder's shape."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.messages.lora import LoRARequest


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs by name, of a layer of the model with this config.json."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim", hidden // heads)
    query, key = heads * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def make_adapter(
    folder: Path,
    number: int,
    config: dict[str, Any],
    rank: int = 8,
    alpha: int = 16,
    dtype: torch.dtype = torch.float32,
) -> LoRARequest:
    """The larger alpha, the more texts differ."""
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (out, in_) in linears(config).items():
            place = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{place}.lora_A.weight"] = (torch.randn(rank, in_, generator=generator) * 0.02).to(dtype)
            tensors[f"{place}.lora_B.weight"] = (torch.randn(out, rank, generator=generator) * 0.02).to(dtype)
    path = folder / f"adapter{number}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    return LoRARequest(f"adapter{number}", number, str(path))
