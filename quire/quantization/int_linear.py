"""Linear layers whose weight the checkpoint stores as integers, in any format and for any platform."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn

from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition, keep
from quire.quantization.block_quantized import BlockQuantizedWeight, weight_of
from quire.quantization.fp8 import UNUSED_SCALES
from quire.quantization.int_kernels import IntKernel, MultipliesByKernel
from quire.quantization.int_weight import IntWeight


@dataclass(frozen=True)
class Axis:
    """A dimension of a stored tensor, which has one element for `packed` outputs or inputs."""

    dim: int
    packed: int = 1


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a layer as the checkpoint has it: its shape for all workers, and what its dimensions are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    outputs: Axis | None = None
    inputs: Axis | None = None
    optional: bool = False
    any_shape: bool = False
    dummy: Literal["normal", "ones"] = "normal"  # of floats


class IntScheme(Protocol):
    """A format's way to store one layer: a value, a frozen dataclass. Layers of equal schemes can be fused."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; PER_CHANNEL: all."""
        ...

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        """By name in the checkpoint's layer."""
        ...

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        """From a worker's part of `tensors`, those that were there: all groups of `outputs` outputs."""
        ...


@dataclass(frozen=True)
class StoredSlot(LoadSlot):
    """For a tensor as stored. `loaded` is where its name appears once it is there."""

    name: str = ""
    loaded: set[str] = field(default_factory=set)

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        yield self.view
        self.loaded.add(self.name)


class StoredPart:
    """The tensors of one partition, until all of the layer is loaded."""

    def __init__(
        self, scheme: IntScheme, partition: Partition, local_inputs: int, module: str, device: torch.device
    ) -> None:
        self.scheme, self.partition, self.module = scheme, partition, module
        self.local_size = partition.size if partition.dim == 0 else local_inputs
        self.local_inputs = local_inputs
        outputs, inputs = partition.full_shape
        self.group_size = scheme.group_size if scheme.group_size > 0 else inputs
        if inputs % self.group_size:
            raise ValueError(
                f"{module} has {inputs} inputs, which are no multiple of the checkpoint's group size of "
                f"{self.group_size} (quantization_config); allowed: one that divides them, or -1"
            )
        try:
            listed = scheme.tensors(outputs, inputs, inputs // self.group_size)
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from error
        # Older checkpoints have a bias of zeros for layers that have none.
        listed["bias"] = StoredTensor((outputs,), torch.float32, outputs=Axis(0), optional=True)
        self.loaded: set[str] = set()
        self.views: dict[str, torch.Tensor] = {}
        self.slots: dict[str, LoadSlot] = {}
        for name, stored in listed.items():
            self._add(name, stored, device)

    def weight(self) -> IntWeight:
        p = self.partition
        if "bias" in self.loaded and self.views["bias"].any():
            raise ValueError(f"{self.module} has a bias in the checkpoint, which the config does not specify")
        stored = {name: view for name, view in self.views.items() if name in self.loaded}
        try:
            weight = self.scheme.decode(stored, p.size, self.group_size).checked().simplified()
        except ValueError as error:
            raise ValueError(f"{self.module}: {error}") from error
        return weight.part_of_inputs(p.start) if p.dim == 1 else weight

    def _add(self, name: str, stored: StoredTensor, device: torch.device) -> None:
        p, shape, start = self.partition, list(stored.shape), 0
        axis, size = stored.outputs if p.dim == 0 else stored.inputs, self.local_size
        if axis is not None and size != p.full_shape[p.dim]:
            if p.start % axis.packed or size % axis.packed:
                raise ValueError(
                    f"{self.module}: {p.full_shape[p.dim]} {('outputs', 'inputs')[p.dim]} cannot be divided among "
                    f"workers into {size} from {p.start} on, since {name} packs {axis.packed} of them in a number"
                )
            start, shape[axis.dim] = p.start // axis.packed, size // axis.packed
        is_weight = stored.inputs is not None and stored.outputs is not None
        self.views[name] = torch.empty(shape, dtype=stored.dtype, device=device)
        self.slots[name] = StoredSlot(
            self.views[name],
            stored.shape,
            axis.dim if axis is not None else 0,
            start,
            dummy=stored.dummy if is_weight or stored.dtype.is_floating_point else "zeros",
            any_shape=stored.any_shape,
            optional=stored.optional,
            has_rows=False,
            members_dim=stored.outputs.dim if stored.outputs is not None else None,
            name=name,
            loaded=self.loaded,
        )


@dataclass(frozen=True)
class IntLinearMethod(MultipliesByKernel):
    """Reads a format's tensors, decodes them to an IntWeight for each partition, and has a kernel multiply by these."""

    scheme: IntScheme
    kernel: IntKernel
    module: str = field(default="a linear layer", compare=False)  # for messages; of a fused layer, one of them

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        keep(layer, "block_weight", BlockQuantizedWeight(in_features, out_partition_sizes, dtype))
        keep(layer, "stored_on", device)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        inputs, device = weight_of(layer).inputs, layer.stored_on
        parts = [StoredPart(self.scheme, p, inputs, self.module, device) for p in partitions]  # type: ignore[arg-type]
        keep(layer, "stored_parts", parts)
        return {(name, part.partition.shard): slot for part in parts for name, slot in part.slots.items()}

    def process_after_loading(self, layer: nn.Module) -> None:
        parts: list[StoredPart] = layer.stored_parts  # type: ignore[assignment]
        del layer.stored_parts
        self.kernel.prepare(layer, (part.weight() for part in parts), self.module)


class IntConfig(Protocol):
    """A parsed quantization_config."""

    def scheme(self, name: str) -> IntScheme | None:
        """Of the linear layer of that name in the checkpoint, `lm_head` among them; None: not quantized."""
        ...

    def describe(self) -> str: ...


class IntCheckpoint:
    """A checkpoint of integers: the format's config says how each layer is stored, a kernel how it is multiplied."""

    ignored: tuple[str, ...] = UNUSED_SCALES

    def __init__(self, config: IntConfig, kernel: IntKernel) -> None:
        self.config, self.kernel = config, kernel

    def linear_method(self, name: str) -> LinearMethod | None:
        scheme = self.config.scheme(name)
        return None if scheme is None else IntLinearMethod(scheme, self.kernel, name)

    def head_method(self) -> LinearMethod | None:
        return self.linear_method("lm_head")

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        return f"{self.config.describe()}; {self.kernel.describe()}"
