"""Where a checkpoint tensor is loaded to: a view into a parameter, and the shard of the tensor this worker holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

ShardId = str | int | None  # "q", "k", "v"; 0, 1 of gate and up; None for a parameter that is one tensor


@dataclass(frozen=True)
class LoadSlot:
    view: torch.Tensor
    full_shape: tuple[int, ...]  # of the tensor in the checkpoint, all workers together
    dim: int = 0  # split among workers along this dimension,
    start: int = 0  # this worker's part beginning here
    dummy: Literal["normal", "ones", "zeros", "orthogonal"] = "normal"  # how it is filled without a checkpoint
    any_shape: bool = False  # the checkpoint may have more or fewer dimensions of one
    optional: bool = False  # the checkpoint need not have it
    has_rows: bool = True  # the tensor is [outputs, ...], as transforms of a family's weights expect
    members_dim: int | None = 0  # along which one tensor may hold several partitions; None: it is the same for all

    @property
    def is_whole(self) -> bool:
        return tuple(self.view.shape) == self.full_shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of what `opened` gives: this worker's part of the tensor."""
        return tuple(self.view.shape)

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """The view to write this worker's shard into; it takes effect when the block ends."""
        yield self.view

    def load_directly(self, tensor: object) -> bool:
        """Load the whole tensor without `opened`, if the slot can; whether it did."""
        return False

    def pieces(self, view: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        """(part of the view, dimension, start): what of the whole tensor is read into which part."""
        return [(view, self.dim, self.start)]

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        return full.narrow(self.dim, self.start, self.view.shape[self.dim])


Slots = dict[tuple[str, ShardId], LoadSlot]  # by parameter and shard


@runtime_checkable
class HasLoadSlots(Protocol):
    def load_slots(self) -> Slots:
        """(parameter name, shard) -> slot, for the module's own parameters."""
        ...


@runtime_checkable
class HasDummySlots(Protocol):
    def dummy_slots(self) -> Slots:
        """The same parameters in fewer slots, to fill at random."""
        ...


def all_load_slots(model: nn.Module, dummy: bool = False) -> Slots:
    """The slots of every module under `model`, by full parameter name; `dummy`: in as few slots as possible."""
    return dict(_walk(model, dummy))


def _walk(model: nn.Module, dummy: bool) -> Iterator[tuple[tuple[str, ShardId], LoadSlot]]:
    for path, module in model.named_modules():
        slots: Slots = {}
        if dummy and isinstance(module, HasDummySlots):
            slots = module.dummy_slots()
        elif isinstance(module, HasLoadSlots):
            slots = module.load_slots()
        for (name, shard), slot in slots.items():
            yield (f"{path}.{name}", shard), slot


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Uninitialised, for inference."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
