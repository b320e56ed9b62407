"""Finds a model's config: of a shape, a folder, a .gguf file or a hub id. No weights are read or downloaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint import hub
from quire.checkpoint.config import check_kinds, load_hf_config
from quire.checkpoint.resolve import HUB_ID, Checkpoint, resolve_model


def find_config(model: str, shapes: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The model's config, and the size of its file if that is a GGUF. `shapes`: configs that have a name."""
    here = Path(model).expanduser().exists()
    if model in shapes and not here:
        return shapes[model], 0
    hub_id = HUB_ID.fullmatch(model)
    if here or (hub_id is not None and hub_id["gguf"] is not None):
        checkpoint = resolve_model(model, load_format="dummy")
    elif hub_id is not None:
        # Only the configuration: a tokenizer takes longer to download than a plan to make.
        folder = hub.download(model, ("config.json", "hf_quant_config.json"), revision=None, download_dir=None)
        checkpoint = Checkpoint(model, "dummy", folder, ())
    else:
        raise ValueError(
            f"No model at {model!r}: there is no such file or folder, and it is not a hub id. Give a folder with a "
            f"config.json, a .gguf file, a hub id like 'org/name', or a shape: {', '.join(shapes)}"
        )
    config = load_hf_config(checkpoint)
    check_kinds(config, model)
    return config, checkpoint.path.stat().st_size if checkpoint.is_gguf else 0
