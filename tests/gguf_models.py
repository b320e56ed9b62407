"""Tiny models as GGUF files, with llama.cpp's names (the gguf package's own table) and what its converter does to
tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Change = Callable[[str, torch.Tensor, Any], torch.Tensor]


def write_gguf_of(
    model: Any,
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    change: Change | None = None,
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """`model` is one of transformers; `metadata` comes without the architecture's prefix. `change` gets a tensor's name
    in GGUF, the tensor and the model's config. `quantized`: the type of all matrices."""
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
    }
    for key, value in (common | metadata).items():
        _add(writer, f"{architecture}.{key}", value)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name.startswith(("lm_head", "embed_out")):
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        data = np.ascontiguousarray((change(gguf_name, tensor, config) if change else tensor).numpy())
        if quantized is not None and data.ndim == 2 and "norm" not in gguf_name:
            writer.add_tensor(gguf_name, gguf.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        writer.add_tensor(key.partition(".")[2], value)  # a number of the configuration, but too many for metadata
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    add[type(value)](key, value)
