"""From what the user asked to a configuration that knows its model."""

import dataclasses
from typing import Any

from quire.checkpoint.config import load_eos_token_ids, load_hf_config
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.config import EngineConfig
from quire.sample.user_processors import processor_classes


def resolve_config(config: EngineConfig) -> tuple[EngineConfig, Checkpoint]:
    """Find the model and read its configuration. Needs no torch: what depends on the device is filled in where that is
    (`platforms/defaults.py`)."""
    asked = config.model
    processor_classes(asked.logits_processors)  # what is wrong with them is said before the model is loaded
    checkpoint = resolve_model(
        asked.model,
        load_format=config.load.load_format,
        revision=asked.revision,
        download_dir=config.load.download_dir,
    )
    hf_config = load_hf_config(checkpoint)
    longest = longest_sequence(hf_config)
    if asked.max_model_len is not None and asked.max_model_len > longest:
        raise ValueError(
            f"max_model_len is {asked.max_model_len}, but {checkpoint.name} has positions for {longest} tokens; "
            f"use at most that (--max-model-len)"
        )
    model = dataclasses.replace(
        asked,
        hf_config=hf_config,
        eos_token_ids=load_eos_token_ids(checkpoint, hf_config),
        vocab_size=int(hf_config["vocab_size"]),
        longest=longest,
    )
    return config.replace(model=model), checkpoint


def longest_sequence(hf_config: dict[str, Any]) -> int:
    """max_position_embeddings, stretched where the rope scaling is made for more than that."""
    positions = int(hf_config.get("max_position_embeddings") or 2048)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = float(rope.get("factor") or 1.0)
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    if kind == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return positions
