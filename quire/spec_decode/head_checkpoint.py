"""Checkpoints of draft heads: small folders of a config.json and weights that belong to another model's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from quire.checkpoint import hub
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import HUB_ID, Checkpoint, resolve_model
from quire.checkpoint.tensors import CheckpointTensor, open_tensors
from quire.config import EngineConfig
from quire.layers.load_slot import all_load_slots
from quire.models.loading.weight_loader import abbreviated, init_dummy_weights, read_shard
from quire.models.loading.weight_map import WeightMap

OTHER_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # that resolve_model does not know


def check_keys(config: EngineConfig) -> None:
    """ValueError if a key of speculative_config means nothing for heads."""
    method = config.speculative.method
    if config.speculative.quantization is not None:
        raise ValueError(f"speculative_config: heads ({method}) are not quantized; leave out 'quantization'")
    if config.speculative.draft_sample_method != "greedy":
        raise ValueError(
            f"speculative_config: heads ({method}) propose their likeliest tokens; leave out 'draft_sample_method'"
        )


def open_head(config: EngineConfig) -> Checkpoint:
    """The files of speculative_config's model."""
    check_keys(config)
    name = config.speculative.model
    if name is None:
        raise ValueError(
            f"speculative_config: method {config.speculative.method!r} needs 'model', the folder or hub id of the head"
        )
    revision, download_dir = config.speculative.revision, config.load.download_dir
    if config.load.load_format == "dummy":
        return resolve_model(name, load_format="dummy", revision=revision, download_dir=download_dir)
    folder = Path(name).expanduser()
    if config.speculative.method == "medusa" and not folder.exists() and HUB_ID.fullmatch(name):
        folder = hub.download(name, ("config.json", "*.safetensors", *OTHER_FILES), revision, download_dir)
    for file in (folder / other for other in OTHER_FILES):
        if file.is_file():
            return Checkpoint(name, "pt" if file.suffix == ".pt" else "safetensors", file.parent, (file,))
    return resolve_model(name, revision=revision, download_dir=download_dir)


def head_hf_config(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    return config.speculative.hf_config or load_hf_config(checkpoint)


def head_tensors(checkpoint: Checkpoint) -> list[CheckpointTensor]:
    return [] if checkpoint.format == "dummy" else list(open_tensors(checkpoint))


def load_head(head: nn.Module, checkpoint: Checkpoint, tensors: Iterable[CheckpointTensor], names: WeightMap) -> None:
    """Fill every parameter, by the checkpoint or at random; a tensor too few or too many is a ValueError."""
    if checkpoint.format == "dummy":
        init_dummy_weights(head)
        return
    slots = all_load_slots(head)
    unexpected: list[str] = []
    for tensor in tensors:
        target = names.target(tensor.name)
        if names.is_ignored(tensor.name):
            continue
        slot = slots.pop((target.parameter, target.shards[0]), None) if target is not None else None
        if slot is None:
            unexpected.append(tensor.name)
            continue
        if tuple(tensor.shape) != slot.full_shape:
            raise ValueError(
                f"{checkpoint.name}: {tensor.name} has shape {list(tensor.shape)}; for this target and the head's "
                f"config it must be {list(slot.full_shape)}"
            )
        with slot.opened() as view:
            read_shard(tensor, slot, view)
            # Its layers would write them into blocks of the cache, which other layers own later.
            if view.dtype.itemsize > 1 and not bool(view.isfinite().all()):
                raise ValueError(f"{checkpoint.name}: {tensor.name} has infinite numbers or NaN; all must be finite")
    missing = [names.checkpoint_name(*key) for key, slot in slots.items() if not slot.optional]
    for what, found in (("lacks", missing), ("has unknown", unexpected)):
        if found:
            raise ValueError(
                f"{checkpoint.name} does not fit the head that its config describes: it {what} {abbreviated(found)}"
            )
