"""What a checkpoint says about its model: config.json, generation defaults, and where generation ends."""

import json
from pathlib import Path
from typing import Any

from quire.checkpoint.resolve import Checkpoint


def load_hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's config.json, or the same made from a GGUF's metadata."""
    if checkpoint.is_gguf:
        from quire.checkpoint.gguf_config import gguf_to_hf_config
        from quire.checkpoint.gguf_header import read_header

        return gguf_to_hf_config(read_header(checkpoint.path))
    config = read_json(checkpoint.path / "config.json")
    if config is None:
        raise ValueError(f"{checkpoint.path} has no config.json; it is not a Hugging Face model folder")
    return config


def load_generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json; empty where there is none."""
    if checkpoint.is_gguf:
        return {}
    return read_json(checkpoint.path / "generation_config.json") or {}


def load_eos_token_ids(checkpoint: Checkpoint, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends a generation, ascending: a chat model must stop at its end of turn, too.

    Where neither config.json nor generation_config.json names one, it is the tokenizer's end of text.
    """
    ids: set[int] = set()
    for config in (load_generation_config(checkpoint), hf_config, hf_config.get("text_config") or {}):
        eos = config.get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else () if eos is None else (eos,))
    if checkpoint.is_gguf:
        from quire.checkpoint.gguf_config import gguf_eos_token_ids
        from quire.checkpoint.gguf_header import read_header

        ids |= gguf_eos_token_ids(read_header(checkpoint.path))
    elif not ids:
        from quire.checkpoint.special_tokens import tokenizer_eos_id

        eos = tokenizer_eos_id(checkpoint.path)
        ids.update(() if eos is None else (eos,))
    return tuple(sorted(ids))


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content
