"""Building a model and streaming its weights straight into place."""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor, count_tensors, open_tensors
from quire.layers.load_slot import LoadSlot, all_load_slots
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.decoder import DecoderModel
from quire.models.registry import model_class
from quire.models.weight_map import Target

MAX_NAMES_IN_ERROR = 5


def load_model(
    ckpt: Checkpoint,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel = SINGLE,
    progress: bool = False,
    seed: int = 0,
) -> DecoderModel:
    """The model of `hf_config` with the checkpoint's weights, ready for inference. `seed` is for dummy weights."""
    model = model_class(hf_config)(hf_config, dtype, torch.device(device), tp)
    if ckpt.format == "dummy":
        fill_with_random(model, seed)
    else:
        tensors = with_progress(open_tensors(ckpt), count_tensors(ckpt)) if progress else open_tensors(ckpt)
        fill_from(model, tensors)
    model.process_after_loading()
    return model.eval()


def fill_from(model: DecoderModel, tensors: Iterable[CheckpointTensor]) -> None:
    """Read every tensor into its parameter. A missing, unexpected or misshapen one is a ValueError that names it."""
    weight_map = model.weight_map()
    slots = all_load_slots(model)
    unexpected: list[str] = []
    for tensor in tensors:
        if weight_map.is_ignored(tensor.name):
            continue
        target = weight_map.target(tensor.name)
        slot = slots.pop((target.parameter, target.shard), None) if target else None
        if target is None or slot is None:
            unexpected.append(tensor.name)
        else:
            _read(tensor, target, slot)
    missing = [weight_map.checkpoint_name(*key) for key in slots]
    complaints = [
        f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has unknown", unexpected)) if names
    ]
    if complaints:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: it {' and '.join(complaints)}")


def fill_with_random(model: DecoderModel, seed: int = 0) -> None:
    """Weights for measuring without a checkpoint, the same for the same seed and device."""
    slots = all_load_slots(model)
    device = next(iter(slots.values())).view.device
    generator = torch.Generator(device=device).manual_seed(seed)
    for slot in slots.values():
        if slot.dummy == "normal":
            slot.view.normal_(0.0, 0.02, generator=generator)
        else:
            slot.view.fill_(1.0 if slot.dummy == "ones" else 0.0)


def with_progress(tensors: Iterable[CheckpointTensor], count: int) -> Iterable[CheckpointTensor]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        return tensors
    from tqdm import tqdm

    return tqdm(tensors, total=count, desc="Loading weights", unit="tensor")


def _read(tensor: CheckpointTensor, target: Target, slot: LoadSlot) -> None:
    if target.transform is None:
        _check_shape(tensor.name, tensor.shape, slot)
        if slot.is_whole:
            tensor.read_into(slot.view)
            return
    full = torch.empty(tensor.shape, dtype=slot.view.dtype, device=slot.view.device)
    tensor.read_into(full)
    if target.transform is not None:
        full = target.transform(full)
        _check_shape(tensor.name, full.shape, slot)
    slot.view.copy_(slot.part_of(full))


def _check_shape(name: str, shape: Iterable[int], slot: LoadSlot) -> None:
    if tuple(shape) != slot.full_shape:
        raise ValueError(
            f"{name} has shape {list(shape)} in the checkpoint, but the config asks for {list(slot.full_shape)}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    rest = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {rest} more" if rest > 0 else shown
