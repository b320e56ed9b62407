"""Fills a loaded model with another one's weights where they are: graphs and recorded steps hold their addresses."""

import enum
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.layers.cache_layer import CacheLayer

# Values that describe what a step does: those of a captured step cannot change.
CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, type(None))
# Of modules: what belongs to torch, holds other modules, or has no weights.
_NOT_VISITED = {"_modules", "_non_persistent_buffers_set", "training", "method", "tp", "options", "hf", "config"}
_NOT_VISITED |= {"stage", "low_rank", "low_rank_rows", "terms"}  # the last three are of adapters
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class Replacement:
    name: str
    used: torch.Tensor  # at an address that stays
    new: torch.Tensor


def replacements(used: nn.Module, new: nn.Module) -> list[Replacement]:
    """What of `new` replaces what of `used`, a model of the same kind that runs. ValueError, which names the place, if
    something differs in more than numbers: then neither has been changed."""
    for ours, theirs in _modules(used, new):
        if isinstance(theirs, CacheLayer) and isinstance(ours, CacheLayer) and hasattr(ours, "backend"):
            theirs.prepare_weights(ours.backend)
    visited = _Visit()
    for path, (ours, theirs) in zip(_paths(new), _modules(used, new), strict=True):
        for name, value in _state(theirs).items():
            visited.compare(f"{path}.{name}" if path else name, vars(ours).get(name, _MISSING), value)
    return visited.found


def replace_all(found: list[Replacement]) -> None:
    with torch.inference_mode():
        for one in found:
            one.used.copy_(one.new)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """All that a model holds, packed weights included."""
    visited = _Visit()
    for path, module in model.named_modules():
        for name, value in _state(module).items():
            visited.compare(f"{path}.{name}", value, value)
    return [one.used for one in visited.found]


def _state(module: nn.Module) -> dict[str, Any]:
    skipped = _NOT_VISITED | set(module.bound_fields if isinstance(module, CacheLayer) else ())
    return {name: value for name, value in vars(module).items() if name not in skipped and not name.endswith("_hooks")}


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules()]


def _modules(used: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    there = dict(used.named_modules())
    for path, module in new.named_modules():
        if path not in there:
            raise _differs(path, "the model in use has no such part")
        yield there[path], module


class _Missing:
    pass


_MISSING = _Missing()


class _Visit:
    """Two values of the same place, and all that they hold."""

    def __init__(self) -> None:
        self.found: list[Replacement] = []
        self._seen: set[tuple[int, int]] = set()

    def compare(self, name: str, used: Any, new: Any) -> None:
        if isinstance(new, torch.Tensor):
            self._tensor(name, used, new)
        elif isinstance(new, CONSTANTS):
            if not isinstance(used, _Missing) and not _equal(used, new):
                raise _differs(name, f"it is {used!r} in the model in use and {new!r} in the new one")
        elif not isinstance(new, (nn.Module, type)) and (id(used), id(new)) not in self._seen:
            self._seen.add((id(used), id(new)))
            self._held(name, used, new)

    def _held(self, name: str, used: Any, new: Any) -> None:
        if isinstance(new, Mapping):
            for key, value in new.items():
                self.compare(f"{name}.{key}", used.get(key, _MISSING) if isinstance(used, Mapping) else _MISSING, value)
        elif isinstance(new, (list, tuple)):
            if not isinstance(used, (list, tuple)) or len(used) != len(new):
                raise _differs(name, "it has other parts in the model in use")
            for index, (ours, theirs) in enumerate(zip(used, new, strict=True)):
                self.compare(f"{name}.{index}", ours, theirs)
        else:
            self._object(name, used, new)

    def _tensor(self, name: str, used: Any, new: torch.Tensor) -> None:
        if not isinstance(used, torch.Tensor):
            raise _differs(name, "it is stored in another way in the model in use")
        if (used.shape, used.dtype, used.layout) != (new.shape, new.dtype, new.layout):
            ours, theirs = (f"{list(tensor.shape)} of {tensor.dtype}" for tensor in (used, new))
            raise _differs(name, f"it is {ours} in the model in use and {theirs} in the new one")
        if new.layout is not torch.strided:
            raise _differs(name, "its layout on this processor cannot be written to")
        if (id(used), id(new)) not in self._seen:
            self._seen.add((id(used), id(new)))
            self.found.append(Replacement(name, used, new))

    def _object(self, name: str, used: Any, new: Any) -> None:
        if isinstance(new, types.FunctionType):
            # A product with a packed weight may be a function that holds it.
            cells = [cell.cell_contents for cell in new.__closure__ or ()]
            ours = [cell.cell_contents for cell in getattr(used, "__closure__", None) or ()]
            self.compare(name, ours, cells)
        elif type(new).__module__.partition(".")[0] == _OURS:
            if type(used) is not type(new):
                if any(True for _ in _tensors_in(new)):
                    raise _differs(name, "it is stored in another way in the model in use")
                return
            for field, value in _fields(new).items():
                self.compare(f"{name}.{field}", getattr(used, field, _MISSING), value)


def _fields(value: Any) -> dict[str, Any]:
    """Without those that hold addresses of others: such stay what they are."""
    addresses = getattr(type(value), "address_fields", ())
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    found = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return {name: held for name, held in found.items() if name not in addresses}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (held for held in _fields(value).values() if isinstance(held, torch.Tensor))


def _equal(used: Any, new: Any) -> bool:
    return bool(used == new) or (used != used and new != new)  # NaN


def _differs(name: str, how: str) -> ValueError:
    place = name.replace("_parameters.", "").replace("_buffers.", "")
    return ValueError(f"the new weights do not fit the model in use: {place}: {how}; start an engine with them instead")
