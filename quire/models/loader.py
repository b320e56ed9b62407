"""Building a model and streaming its weights straight into place."""

import logging
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from math import prod
from typing import Any

import torch

from quire.checkpoint.heap import large_buffers_mapped
from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor, count_tensors, open_tensors, reader_pool
from quire.layers.load_slot import LoadSlot, all_load_slots
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.decoder import DecoderModel
from quire.models.registry import model_class
from quire.models.weight_map import Target
from quire.quantization.select import choose_quantization

logger = logging.getLogger("quire")

MAX_NAMES_IN_ERROR = 5
# Tensors handed to the readers ahead of time: enough that one large tensor leaves no thread idle, few enough that the
# progress bar is true and shards are opened one after the other.
MAX_READS_AHEAD = 32


def load_model(
    ckpt: Checkpoint,
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    tp: TensorParallel = SINGLE,
    progress: bool = False,
    seed: int = 0,
    max_model_len: int | None = None,
    quantization: str | None = None,
) -> DecoderModel:
    """The model of `hf_config` with the checkpoint's weights, ready for inference.

    `seed` is for dummy weights. `max_model_len` is the user's limit, which decides between longrope's factors.
    `quantization` is what the user asked for; None: as the checkpoint is.
    """
    quantized = choose_quantization(quantization, hf_config, dtype, torch.device(device), is_gguf=ckpt.format == "gguf")
    if quantized.describe():
        logger.info(quantized.describe())
    if max_model_len is not None:
        hf_config = hf_config | {"max_model_len": max_model_len}
    with large_buffers_mapped():
        model = model_class(hf_config)(hf_config, dtype, torch.device(device), tp, quantized)
        if ckpt.format == "dummy":
            fill_with_random(model, seed)
        else:
            tensors = with_progress(open_tensors(ckpt), count_tensors(ckpt)) if progress else open_tensors(ckpt)
            fill_from(model, tensors, quantized.ignored)
        model.process_after_loading()
    return model.eval()


def fill_from(model: DecoderModel, tensors: Iterable[CheckpointTensor], ignored: tuple[str, ...] = ()) -> None:
    """Read every tensor into its parameter. A missing, unexpected or misshapen one is a ValueError that names it."""
    weight_map = model.weight_map().ignoring(*ignored)
    slots = all_load_slots(model)
    unexpected: list[str] = []
    reads: deque[Future[None]] = deque()
    with reader_pool() as pool:
        try:
            for tensor in tensors:
                if weight_map.is_ignored(tensor.name):
                    continue
                target = weight_map.target(tensor.name)
                slot = slots.pop((target.parameter, target.shard), None) if target else None
                if target is None or slot is None:
                    unexpected.append(tensor.name)
                    continue
                reads.append(pool.submit(_read, tensor, target, slot))
                if len(reads) > MAX_READS_AHEAD:
                    reads.popleft().result()
            while reads:
                reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()
    missing = [weight_map.checkpoint_name(*key) for key in slots]
    complaints = [
        f"{what} {_some(names)}" for what, names in (("lacks", missing), ("has unknown", unexpected)) if names
    ]
    if complaints:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: it {' and '.join(complaints)}")


def fill_with_random(model: DecoderModel, seed: int = 0) -> None:
    """Weights for measuring without a checkpoint, the same for the same seed and device."""
    generator: torch.Generator | None = None
    for slot in all_load_slots(model).values():
        with slot.opened() as view:
            generator = generator or torch.Generator(device=view.device).manual_seed(seed)
            if slot.dummy != "normal":
                view.fill_(1.0 if slot.dummy == "ones" else 0.0)
            elif view.dtype.itemsize > 1:
                view.normal_(0.0, 0.02, generator=generator)
            else:  # torch draws no fp8 numbers
                numbers = torch.empty(view.shape, dtype=torch.bfloat16, device=view.device)
                view.copy_(numbers.normal_(0.0, 0.02, generator=generator))


def with_progress(tensors: Iterable[CheckpointTensor], count: int) -> Iterable[CheckpointTensor]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        return tensors
    from tqdm import tqdm

    return tqdm(tensors, total=count, desc="Loading weights", unit="tensor")


def _read(tensor: CheckpointTensor, target: Target, slot: LoadSlot) -> None:
    try:
        _read_into_slot(tensor, target, slot)
    except (RuntimeError, OSError) as error:
        raise RuntimeError(f"{tensor.name} could not be read from the checkpoint: {error}") from error


def _read_into_slot(tensor: CheckpointTensor, target: Target, slot: LoadSlot) -> None:
    if target.transform is None and not slot.any_shape:
        _check_shape(tensor.name, tensor.shape, slot)
    if target.transform is None and slot.take(tensor):
        return
    with slot.opened() as view:
        if target.transform is None and slot.is_whole and tuple(tensor.shape) == slot.full_shape:
            tensor.read_into(view)
            return
        full = torch.empty(tensor.shape, dtype=view.dtype, device=view.device)
        tensor.read_into(full)
        if target.transform is not None:
            full = target.transform(full)
        if slot.any_shape and full.numel() == prod(slot.full_shape):
            full = full.view(slot.full_shape)
        _check_shape(tensor.name, full.shape, slot)
        view.copy_(slot.part_of(full))


def _check_shape(name: str, shape: Iterable[int], slot: LoadSlot) -> None:
    if tuple(shape) != slot.full_shape:
        raise ValueError(
            f"{name} has shape {list(shape)} in the checkpoint, but the config asks for {list(slot.full_shape)}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    rest = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {rest} more" if rest > 0 else shown
