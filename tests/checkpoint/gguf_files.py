"""Small GGUF files for tests, written with the gguf package's own writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, FFN = 256, 8, 2, 32, 300, 512


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]],
    *,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A file with the usual metadata of a tiny model. A tensor with a type holds raw bytes of that type."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def random_floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
