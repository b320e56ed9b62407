"""Tiny models as GGUF files, with llama.cpp's names (the gguf package's own table) and what its converter does to
tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.quantization.blocks import random_blocks

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
    # The latter for dense layers of mixtures.
    names = [gguf.get_tensor_name_map(each, config.num_hidden_layers) for each in (arch, gguf.MODEL_ARCH.LLAMA)]
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
        for part_name, part in _parts(name, tensor, architecture == "gpt-oss"):
            known = (table.get_name(part_name, try_suffixes=(".weight", ".bias")) for table in names)
            gguf_name = next(filter(None, known), None)
            assert gguf_name is not None, part_name
            data = np.ascontiguousarray((change(gguf_name, part, config) if change else part).numpy())
            if quantized is not None and gguf_name.endswith("weight") and "norm" not in gguf_name and data.ndim > 1:
                plain = "ffn_gate_inp" in gguf_name or data.shape[-1] % gguf.GGML_QUANT_SIZES[quantized][0]
                kind = gguf.GGMLQuantizationType.F32 if plain else quantized
                writer.add_tensor(gguf_name, gguf.quantize(data, kind), raw_dtype=kind)
            else:
                writer.add_tensor(gguf_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _parts(name: str, tensor: torch.Tensor, alternating: bool) -> list[tuple[str, torch.Tensor]]:
    """Experts as llama.cpp has them, [experts, outputs, inputs], gate and up apart. `alternating`: as gpt-oss has them,
    gate and up in turns and inputs first."""
    module, _, last = name.replace("block_sparse_moe.experts", "mlp.experts").rpartition(".")
    if not module.endswith("experts"):
        # As in checkpoints, whose names the table has, rather than in transformers.
        name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
        return [(f"{name}.weight" if last == "sinks" else name, tensor)]
    suffix = ".bias" if last.endswith("_bias") else ".weight"
    if alternating and suffix == ".weight":
        tensor = tensor.transpose(1, 2)
    if last.startswith("down"):
        return [(f"{module}.down_proj{suffix}", tensor)]
    halves = (tensor[:, 0::2], tensor[:, 1::2]) if alternating else tensor.chunk(2, 1)
    return [(f"{module}.{kind}_proj{suffix}", half) for kind, half in zip(("gate", "up"), halves, strict=True)]


def write_random_llama(path: Path, type_of: Callable[[str], str], layers: int = 2, context: int = 512) -> Path:
    """A Llama with random blocks of any type: `type_of` gets a tensor's name in GGUF."""
    hidden, heads, kv_heads, width, vocab = 256, 8, 4, 512, 320
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "context_length": context,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": width,
    }
    numbers |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    numbers |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
    for key, value in numbers.items():
        _add(writer, f"llama.{key}", value)
    shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    linears = {"attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden)}
    linears |= {"attn_output": (hidden, hidden), "ffn_gate": (width, hidden), "ffn_up": (width, hidden)}
    linears |= {"ffn_down": (hidden, width)}
    norms = ["output_norm"]
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in linears.items()}
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
    for seed, (name, (rows, columns)) in enumerate(shapes.items()):
        type_name = type_of(name)
        _, numbers_of = random_blocks(type_name, rows, columns, seed)
        size = 0.06 / float(numbers_of.std())
        blocks, _ = random_blocks(type_name, rows, columns, seed, size)
        writer.add_tensor(f"{name}.weight", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[type_name])
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
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
