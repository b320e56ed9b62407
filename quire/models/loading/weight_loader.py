"""Streams a checkpoint's tensors into a model's parameters, or fills these with dummy weights."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from quire.checkpoint.tensors import CheckpointTensor, ReadsParts, read_part, reader_pool
from quire.layers.load_slot import LoadSlot, Slots, all_load_slots
from quire.models.decoder import DecoderModel
from quire.models.loading.kv_scales import KVScaleLoader
from quire.models.loading.transforms import RowOrder
from quire.models.loading.weight_map import Target, WeightMap
from quire.quantization.block_quantized import StoredBlocks

MAX_NAMES_IN_ERROR = 5
# Of checkpoints for pooling: read by pooling/heads.py, unless the model has them.
POOLING_HEADS = ("score.{p}", "score.{i}.{p}", "classifier.{p}", "v_head.{p}", "v_head.summary.{p}", "linear.{p}")
DUMMY_STD = 0.02
# Tensors queued for the reader threads: enough that one large tensor leaves no thread idle, few enough that the
# progress bar is accurate and shards are opened one after the other.
MAX_READS_AHEAD = 32


def load_weights(
    model: DecoderModel,
    tensors: Iterable[CheckpointTensor],
    ignored: tuple[str, ...] = (),
    backbone: bool = False,
    threads: int | None = None,
    slots: Slots | None = None,
) -> None:
    """Read every tensor into its parameter. A missing, unexpected or misshapen one is a ValueError that names it.
    `slots`: into these instead of the model's own."""
    weight_map = model.weight_map().ignoring(*ignored)
    if backbone:
        weight_map = weight_map.also_without("model.")
    of_pooling = WeightMap((), POOLING_HEADS if backbone else ())
    tied = model.head_names() if model.has_tied_head and slots is None else ()
    slots = all_load_slots(model) if slots is None else dict(slots)
    unexpected: list[str] = []
    heads: list[CheckpointTensor] = []
    kv_scales = KVScaleLoader(model.cache_layers())

    def reads() -> Iterator[Callable[[], None]]:
        ours = (tensor for tensor in tensors if not model.is_elsewhere(tensor.name))
        for tensor in model.regroup_tensors(ours):
            if tensor.name in tied:
                heads.append(tensor)
            if kv_scales.takes(tensor) or weight_map.is_ignored(tensor.name):
                continue
            target = weight_map.target(tensor.name)
            if target is None and of_pooling.is_ignored(tensor.name):
                continue
            found = [slots.pop((target.parameter, shard), None) for shard in target.shards] if target else []
            matched = [slot for slot in found if slot is not None]
            if target is None or len(matched) < len(found):
                unexpected.append(tensor.name)
                continue
            yield partial(_read, tensor, target, matched)

    read_all(reads(), threads)
    for head in heads:
        model.check_tied_head(head)
    missing = [weight_map.checkpoint_name(*key) for key, slot in slots.items() if not slot.optional]
    missing = list(dict.fromkeys(missing))  # one tensor of the checkpoint may fill several slots
    complaints = [
        f"{what} {abbreviated(names)}" for what, names in (("lacks", missing), ("has unknown", unexpected)) if names
    ]
    if complaints:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: it {' and '.join(complaints)}")


def read_all(reads: Iterable[Callable[[], None]], threads: int | None = None) -> None:
    """Call them in the reader threads, in order; the first error is raised."""
    running: deque[Future[None]] = deque()
    with reader_pool(threads) as pool:
        try:
            for read in reads:
                running.append(pool.submit(read))
                if len(running) > MAX_READS_AHEAD:
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            for left in running:
                left.cancel()


def init_dummy_weights(model: nn.Module, seed: int = 0) -> None:
    """Random weights for benchmarks without a checkpoint, reproducible for a seed and device."""
    generator: torch.Generator | None = None
    count = 0  # of those with random numbers of their own
    for slot in all_load_slots(model, dummy=True).values():
        if slot.optional:
            continue
        with slot.opened() as view:
            generator = generator or torch.Generator(device=view.device).manual_seed(seed)
            if slot.dummy == "orthogonal":
                count += 1
                view.copy_(_orthogonal_rows(view.shape[0], view.shape[1], (seed + 1) * 100_003 + count))
            elif slot.dummy != "normal":
                view.fill_(1.0 if slot.dummy == "ones" else 0.0)
            elif not view.is_floating_point():  # packed numbers
                view.random_(torch.iinfo(view.dtype).min, torch.iinfo(view.dtype).max, generator=generator)
            elif view.dtype.itemsize > 1:
                view.normal_(0.0, DUMMY_STD, generator=generator)
            else:  # torch has no random fp8 numbers
                numbers = torch.empty(view.shape, dtype=torch.bfloat16, device=view.device)
                view.copy_(numbers.normal_(0.0, DUMMY_STD, generator=generator))


def _orthogonal_rows(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Of equal norm, that of normal ones on average. On the CPU, where small factorizations are fast to start."""
    normal = torch.empty(rows, columns).normal_(generator=torch.Generator().manual_seed(seed))
    made = torch.linalg.qr(normal.T)[0].T if rows <= columns else F.normalize(normal)
    return made * (DUMMY_STD * columns**0.5)


def _read(tensor: CheckpointTensor, target: Target, slots: list[LoadSlot]) -> None:
    if target.transform is not None and not all(slot.has_rows for slot in slots):
        raise ValueError(
            f"{tensor.name} is a packed weight, but this family's weights are reordered while loading, which is "
            "supported for unquantized ones and GGUF only"
        )
    try:
        if _load_quantized_rows(tensor, target, slots):
            return
        if len(slots) == 1:
            _read_into_slot(tensor, target, slots[0])
        else:
            _split_into_slots(tensor, target, slots)
    except (RuntimeError, OSError) as error:
        raise RuntimeError(f"{tensor.name} could not be read from the checkpoint: {error}") from error


@dataclass(frozen=True)
class _StoredRows:
    """Rows of a tensor in their stored (quantized) form."""

    type_name: str
    blocks: torch.Tensor
    rotary_half: int = 0

    def raw(self) -> torch.Tensor:
        return self.blocks


def _load_quantized_rows(tensor: CheckpointTensor, target: Target, slots: list[LoadSlot]) -> bool:
    """Whether the slots accepted the rows of a tensor in quantized form, reordered or split between them."""
    reordered = isinstance(target.transform, RowOrder)
    if not isinstance(tensor, StoredBlocks) or len(tensor.shape) != 2 or tensor.rotary_half:
        return False
    sizes = [slot.full_shape[0] for slot in slots]
    split = reordered or len(slots) > 1
    if not split or (target.transform and not reordered) or tuple(tensor.shape) != (sum(sizes), slots[0].full_shape[1]):
        return False
    blocks = tensor.raw() if target.transform is None else target.transform(tensor.raw())
    return all(
        slot.load_directly(_StoredRows(tensor.type_name, rows))
        for slot, rows in zip(slots, blocks.split(sizes), strict=True)
    )


def _read_into_slot(tensor: CheckpointTensor, target: Target, slot: LoadSlot) -> None:
    if target.transform is None and not slot.any_shape:
        _check_shape(tensor.name, tensor.shape, slot)
    if target.transform is None and slot.load_directly(tensor):
        return
    with slot.opened() as view:
        if target.transform is None and slot.is_whole and tuple(tensor.shape) == slot.full_shape:
            tensor.read_into(view)
            return
        if target.transform is None and tuple(tensor.shape) == slot.full_shape:
            read_shard(tensor, slot, view)
            return
        full = _read_whole(tensor, target, view)
        full = _reshaped(full, slot, slot.full_shape)
        _check_shape(tensor.name, full.shape, slot)
        view.copy_(slot.part_of(full))


def read_shard(tensor: CheckpointTensor, slot: LoadSlot, view: torch.Tensor) -> None:
    """This worker's part of a tensor of the slot's full shape into the slot's opened view."""
    for part, dim, start in slot.pieces(view):
        read_part(tensor, part, dim, start)


def _split_into_slots(tensor: CheckpointTensor, target: Target, slots: list[LoadSlot]) -> None:
    """One tensor that holds the outputs of several partitions, one after the other."""
    dim = slots[0].members_dim
    if dim is None:
        for slot in slots:
            _read_into_slot(tensor, target, slot)
        return
    sizes = [slot.full_shape[dim] for slot in slots]
    joined = (*slots[0].full_shape[:dim], sum(sizes), *slots[0].full_shape[dim + 1 :])
    readable = isinstance(tensor, ReadsParts) and target.transform is None and tuple(tensor.shape) == joined
    if readable and all(slot.dim == dim for slot in slots):
        for slot, last in zip(slots, itertools.accumulate(sizes), strict=True):
            with slot.opened() as view:
                read_part(tensor, view, dim, last - slot.full_shape[dim] + slot.start)
        return
    parts: tuple[torch.Tensor, ...] | None = None
    for i, slot in enumerate(slots):
        with slot.opened() as view:
            if parts is None:
                full = _read_whole(tensor, target, view)
                if slot.any_shape and full.numel() == 1:
                    full = full.view(1).expand(sum(sizes))  # one scale for all partitions
                full = _reshaped(full, slot, (sum(sizes), *slot.full_shape[1:]))
                found, expected = full.shape[dim] if dim < full.dim() else 1, sum(sizes)
                if found != expected or dim >= full.dim():
                    raise ValueError(
                        f"{tensor.name} has {found} {'columns' if dim else 'rows'} in the checkpoint; the config "
                        f"specifies {expected}"
                    )
                parts = full.split(sizes, dim)
            _check_shape(tensor.name, parts[i].shape, slot)
            view.copy_(slot.part_of(parts[i]))


def _read_whole(tensor: CheckpointTensor, target: Target, like: torch.Tensor) -> torch.Tensor:
    full = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
    tensor.read_into(full)
    return full if target.transform is None else target.transform(full)


def _reshaped(full: torch.Tensor, slot: LoadSlot, shape: tuple[int, ...]) -> torch.Tensor:
    """With more or fewer dimensions of one, where the slot allows that."""
    if slot.any_shape and [n for n in full.shape if n != 1] == [n for n in shape if n != 1]:
        return full.view(shape)
    return full


def _check_shape(name: str, shape: Iterable[int], slot: LoadSlot) -> None:
    if tuple(shape) != slot.full_shape:
        raise ValueError(
            f"{name} has shape {list(shape)} in the checkpoint, but the config specifies {list(slot.full_shape)}"
        )


def abbreviated(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    rest = len(names) - MAX_NAMES_IN_ERROR
    return f"{shown} and {rest} more" if rest > 0 else shown
