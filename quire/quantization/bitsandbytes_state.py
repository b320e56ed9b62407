"""The tensors that bitsandbytes stores beside a 4-bit weight, joined to one of scales."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.config.values import finite_number, whole_number
from quire.kernels.int_linear import NUMBERS

BLOCK = 64  # numbers of the flattened weight that share a scale, their largest magnitude
STATE = "quant_state.bitsandbytes__"
_NAME = re.compile(rf"(.*)\.weight(?:\.(absmax|quant_map|nested_absmax|nested_quant_map|{re.escape(STATE)}\w+))?")


class StateTensor(Protocol):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    def read_into(self, out: torch.Tensor) -> None: ...


@dataclass
class _Weight:
    """The codes of a weight, with the shape that they have as one of a linear layer."""

    name: str
    shape: tuple[int, ...]
    stored: StateTensor

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(_read(self.stored, torch.uint8).view(self.shape))


@dataclass
class _Absmax:
    """Scales of a weight's groups, which may themselves be stored in 8 bits, in groups with a scale (nested)."""

    name: str
    shape: tuple[int, ...]
    stored: dict[str, StateTensor]
    state: dict[str, Any]

    def read_into(self, out: torch.Tensor) -> None:
        if "nested_blocksize" not in self.state:
            out.copy_(_read(self.stored["absmax"], torch.float32).view(self.shape))
            return
        codes = _read(self.stored["absmax"], torch.uint8).flatten().int()
        scales = _read(self.stored["nested_absmax"], torch.float32).flatten()
        numbers = _read(self.stored["nested_quant_map"], torch.float32).flatten()
        size = self.state["nested_blocksize"]
        if len(numbers) != 256 or len(scales) != -(-len(codes) // size):
            raise ValueError(
                f"{self.name}: {len(codes)} scales in groups of {size} have {len(scales)} scales of their own and "
                f"{len(numbers)} numbers; allowed: one for each group, and 256"
            )
        wide = scales[torch.arange(len(codes)) // size]
        out.copy_((numbers[codes] * wide + self.state["nested_offset"]).view(self.shape))


def regrouped(tensors: Iterable[StateTensor], kind: str) -> Iterator[StateTensor]:
    """A checkpoint's tensors with, for each weight of 4 bits, two: `weight` [outputs, inputs / 2] and `absmax`
    [outputs, groups] float32."""
    waiting: dict[str, dict[str, StateTensor]] = {}
    for tensor in tensors:
        found = _NAME.fullmatch(tensor.name)
        if found is None or (found[2] is None and not (len(tensor.shape) == 2 and tensor.shape[1] == 1)):
            yield tensor
            continue
        module, part = found[1], found[2] or "weight"
        parts = waiting.setdefault(module, {})
        parts[STATE if part.startswith(STATE) else part] = tensor
        if part.startswith(STATE) and part != STATE + kind:
            raise ValueError(
                f"{module} is stored as {part.removeprefix(STATE)}, but the quantization_config has {kind}"
            )
        state = _state_of(module, parts)
        if state is not None and not _lacking(parts, state):
            yield from _joined(module, waiting.pop(module), state, kind)
    for module, parts in waiting.items():
        lacks = _lacking(parts, _state_of(module, parts) or {})
        raise ValueError(f"the checkpoint lacks {', '.join(f'{module}.weight.{name}' for name in lacks)}")


def _state_of(module: str, parts: dict[str, StateTensor]) -> dict[str, Any] | None:
    if STATE not in parts:
        return None
    try:
        state = json.loads(bytes(_read(parts[STATE], torch.uint8).flatten().tolist()))
        outputs, inputs = state["shape"]
        for size in (outputs, inputs):
            whole_number("a size of its shape", size)
        if state["blocksize"] != BLOCK:
            raise ValueError(f"blocksize {state['blocksize']}; allowed: {BLOCK}")
        if "nested_blocksize" in state:
            whole_number("nested_blocksize", state["nested_blocksize"])
            finite_number("nested_offset", state["nested_offset"])
        elif "nested_absmax" in parts:
            raise ValueError("there is a nested_absmax, but no nested_blocksize")
        return dict(state)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{module}.weight.{STATE} in the checkpoint cannot be used: {error}") from error


def _lacking(parts: dict[str, StateTensor], state: dict[str, Any]) -> list[str]:
    nested = ["nested_absmax", "nested_quant_map"] if "nested_blocksize" in state else []
    return [name for name in ("weight", "absmax", "quant_map", STATE, *nested) if name not in parts]


def _joined(module: str, parts: dict[str, StateTensor], state: dict[str, Any], kind: str) -> Iterator[StateTensor]:
    outputs, inputs = state["shape"]
    if inputs % BLOCK:
        raise ValueError(f"{module} has {inputs} inputs; allowed: multiples of the blocks of {BLOCK} (bitsandbytes)")
    for name, count in (("weight", outputs * inputs // 2), ("absmax", outputs * inputs // BLOCK)):
        if math.prod(parts[name].shape) != count:
            raise ValueError(f"{parts[name].name} has shape {list(parts[name].shape)}; allowed: {count} numbers")
    numbers = _read(parts["quant_map"], torch.float32).flatten()
    if len(numbers) != 16 or not torch.allclose(numbers, torch.tensor(NUMBERS[kind]), atol=1e-6):
        raise ValueError(f"{module}.weight.quant_map has other numbers than those of {kind}")
    yield _Weight(f"{module}.weight", (outputs, inputs // 2), parts["weight"])
    yield _Absmax(f"{module}.absmax", (outputs, inputs // BLOCK), parts, state)


def _read(tensor: StateTensor, dtype: torch.dtype) -> torch.Tensor:
    found = torch.empty(tuple(tensor.shape), dtype=dtype)
    tensor.read_into(found)
    return found
