"""What a checkpoint says about its model: config.json, generation defaults, and where generation ends."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.checkpoint.json_file import read_json
from quire.checkpoint.resolve import HUB_ID, Checkpoint
from quire.config.shown import shown
from quire.config.values import whole_number

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "architectures": (list, "a list of names"),
    "model_type": (str, "a text"),
    "torch_dtype": ((str, dict), "a text"),
    "dtype": ((str, dict), "a text"),
    **dict.fromkeys(("text_config", "auto_map", "rope_scaling", "rope_parameters"), (dict, "an object")),
    **dict.fromkeys(("quantization_config", "compression_config"), (dict, "an object")),
}


def load_hf_config(checkpoint: Checkpoint, elsewhere: str | None = None) -> dict[str, Any]:
    """The model's config.json, or its equivalent from a GGUF's metadata, or the one of another folder or hub id."""
    if elsewhere is not None:
        checkpoint = replace(checkpoint, path=_config_folder(elsewhere))
    if checkpoint.is_gguf:
        from quire.checkpoint.gguf_config import gguf_to_hf_config
        from quire.checkpoint.gguf_header import read_header

        return gguf_to_hf_config(read_header(checkpoint.path))
    config = read_json(checkpoint.path / "config.json")
    if config is None:
        raise ValueError(f"{checkpoint.path} has no config.json; it is not a Hugging Face model folder")
    if config.get("quantization_config") is None and config.get("compression_config") is None:
        config |= _modelopt_config(checkpoint.path)
    check_kinds(config, str(checkpoint.path / "config.json"))
    return config


def _modelopt_config(folder: Path) -> dict[str, Any]:
    """ModelOpt's own file, for checkpoints whose config.json does not say how they are quantized."""
    stored = (read_json(folder / "hf_quant_config.json") or {}).get("quantization")
    if not isinstance(stored, dict) or stored.get("quant_algo") is None:
        return {}
    return {"quantization_config": stored | {"quant_method": "modelopt"}}


def _config_folder(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path if path.is_dir() else path.parent
    if HUB_ID.fullmatch(name) is None:
        raise ValueError(f"{name} is neither a folder with a config.json nor a hub id (--hf-config-path)")
    from quire.checkpoint import hub

    return hub.download(name, ("config.json",), revision=None, download_dir=None)


def load_generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json; empty where there is none."""
    if checkpoint.is_gguf:
        return {}
    return read_json(checkpoint.path / "generation_config.json") or {}


def load_eos_token_ids(checkpoint: Checkpoint, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends generation, ascending: a chat model must also stop at its end of turn.

    Where neither config.json nor generation_config.json names one, it is the tokenizer's end of text.
    """
    ids: set[int] = set()
    generation = load_generation_config(checkpoint)
    for config in (generation, hf_config, hf_config.get("text_config") or {}):
        ids.update(_token_ids(config, f"{checkpoint.path}"))
    if checkpoint.is_gguf:
        from quire.checkpoint.gguf_config import gguf_eos_token_ids
        from quire.checkpoint.gguf_header import read_header

        ids |= gguf_eos_token_ids(read_header(checkpoint.path))
    elif not ids:
        from quire.checkpoint.special_tokens import tokenizer_eos_id

        eos = tokenizer_eos_id(checkpoint.path)
        ids.update(() if eos is None else (eos,))
    return tuple(sorted(ids))


def check_kinds(config: dict[str, Any], source: str) -> None:
    """Check the types of keys that are read before the model family is known."""
    for name, (kinds, called) in KINDS.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kinds):
            raise ValueError(f"{source}: {name} is {shown(value)}; it must be {called}")
    named = config.get("architectures") or []
    if not all(isinstance(name, str) for name in named):
        raise ValueError(f"{source}: architectures is {shown(named)}; it must be a list of names")


def _token_ids(config: dict[str, Any], source: str) -> list[int]:
    given = config.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return [whole_number(f"{source}: eos_token_id", token, minimum=0) for token in listed]


def text_part(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Multimodal models keep the language model's config in `text_config`."""
    inner = hf_config.get("text_config")
    return hf_config | inner if isinstance(inner, dict) else hf_config
