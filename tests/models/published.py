"""Published checkpoints as data: their configs, and the names and shapes of their tensors. Each must have a place in
our model, and each of our parameters a tensor.

A file of data/published is {"config": {...}, "tensors": {pattern: shape}}. In a pattern, {0-3} stands for each of the
numbers from 0 to 3.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.layers.load_slot import all_load_slots
from quire.models.decoder import DecoderModel
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.quantization.select import choose_quantization

DATA = Path(__file__).parent / "data" / "published"
META = torch.device("meta")
Shapes = dict[str, list[int]]


def load_published(name: str) -> tuple[dict[str, Any], Shapes]:
    """The config of a checkpoint, and the shapes of all its tensors by name."""
    data = json.loads((DATA / f"{name}.json").read_text())
    return data["config"], {tensor: shape for pattern, shape in data["tensors"].items() for tensor in expanded(pattern)}


def expanded(pattern: str) -> Iterator[str]:
    parts = re.split(r"\{(\d+)-(\d+)\}", pattern)
    ranges = [range(int(a), int(b) + 1) for a, b in zip(parts[1::3], parts[2::3], strict=True)]
    for numbers in itertools.product(*ranges):
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(parts[::3], map(str, numbers), fillvalue="")))


def build_empty(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    """The model of a config, without memory for its weights."""
    quantization = choose_quantization(None, config, dtype, torch.device("cpu"))
    return model_class(config)(config, ModelOptions(dtype, META, quantization=quantization))


def misses(model: DecoderModel, tensors: Shapes) -> list[str]:
    """Tensors without a place, of a wrong shape, and parameters without a tensor: what loading would refuse."""
    weights, slots, found = model.weight_map(), all_load_slots(model), []
    for name, shape in tensors.items():
        if weights.is_ignored(name):
            continue
        target = weights.target(name)
        matched = [slots.pop((target.parameter, shard), None) for shard in target.shards] if target else [None]
        if any(slot is None for slot in matched):
            found.append(f"{name} has no place")
        elif len(matched) == 1 and not matched[0].any_shape and list(matched[0].full_shape) != shape:
            found.append(f"{name} is {shape}, not {list(matched[0].full_shape)}")
    return found + [f"{weights.checkpoint_name(*key)} is missing" for key, slot in slots.items() if not slot.optional]
