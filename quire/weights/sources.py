"""Where new weights come from: a checkpoint, shared memory with safetensors in it, or tensors at hand."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.checkpoint.mapped import copy_into
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.checkpoint.safetensors_file import DTYPES, open_safetensors
from quire.checkpoint.tensors import CheckpointTensor, open_tensors
from quire.config.shown import shown
from quire.config.values import whole_number

PATH, SHARED_MEMORY, DESCRIPTOR, TENSORS = "path", "shared_memory", "descriptor", "tensors"
SOURCES = (PATH, SHARED_MEMORY, DESCRIPTOR, TENSORS)
SHARED_MEMORY_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"[\w-][\w.-]*")
STORED_NAMES = {getattr(torch, name): stored for stored, (name, _) in DTYPES.items()}


class TensorAtHand:
    """A tensor as one of a checkpoint."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        self.name, self.value = name, value
        self.shape = tuple(value.shape)
        self.dtype = STORED_NAMES[value.dtype]

    def tensor(self) -> torch.Tensor:
        return self.value

    def read_into(self, out: torch.Tensor) -> None:
        copy_into(self.name, self.value, out)

    def read_part(self, out: torch.Tensor, dim: int, start: int) -> None:
        copy_into(self.name, self.value.narrow(dim, start, out.shape[dim]), out)


@dataclass
class Outline:
    """A tensor without its values, to check that it fits."""

    name: str
    shape: tuple[int, ...]

    def read_into(self, out: torch.Tensor) -> None:
        pass


def read_source(info: Mapping[str, Any], started_from: Checkpoint) -> list[CheckpointTensor]:
    """The tensors that an `update_info` names; nothing of their values is read yet. `started_from`: what the engine
    was started with, which is meant by a path of None."""
    named = [key for key in SOURCES if key in info]
    if len(named) != 1 or len(info) != 1:
        raise ValueError(f"update_info has {shown(sorted(info))}; it must have one of: {', '.join(SOURCES)}")
    (key,) = named
    value = info[key]
    if key == PATH:
        return list(open_tensors(_checkpoint(value, started_from)))
    if key == TENSORS:
        return list(from_state_dict(value))
    file = _shared_memory(value) if key == SHARED_MEMORY else _descriptor(value)
    try:
        if not file.is_file():  # a pipe, say, would be waited for
            raise ValueError(f"update_info: {key} {shown(value)} is not there, or no memory with safetensors")
        return list(open_safetensors((file,)))
    except OSError as error:
        raise ValueError(f"update_info: {key} {shown(value)} cannot be opened: {error.strerror}") from None


def from_state_dict(tensors: Any) -> list[TensorAtHand]:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"weights are {type(tensors).__name__}; they must be a dict of tensors by their names")
    found = []
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"weights have {shown(name)}: {type(value).__name__}; they must be tensors by their names")
        if value.dtype not in STORED_NAMES:
            raise ValueError(f"{name} is of {value.dtype}, which no checkpoint holds")
        whole = gathered(value.detach())
        plain = type(whole).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        # What cannot be copied must not be found half-way.
        if whole.is_meta or whole.layout is not torch.strided or not plain:
            kind = f"a {type(whole).__name__} on {whole.device}, {whole.layout}"
            raise ValueError(f"{name} is {kind}; it must be a plain tensor with all its values")
        found.append(TensorAtHand(name, whole))
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is split among a trainer's ranks, all of it."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def outlines(tensors: Iterable[CheckpointTensor]) -> list[CheckpointTensor]:
    return [Outline(tensor.name, tuple(tensor.shape)) for tensor in tensors]


def _checkpoint(path: Any, started_from: Checkpoint) -> Checkpoint:
    if path is None:
        if started_from.format == "dummy":
            raise ValueError("the engine was started with random weights; name a checkpoint to load")
        return started_from
    if not isinstance(path, str) or not Path(path).expanduser().exists():
        raise ValueError(f"update_info: path is {shown(path)}; it must be a folder with a checkpoint, or a .gguf file")
    return resolve_model(path)


def _shared_memory(name: Any) -> Path:
    if not isinstance(name, str) or not _NAME.fullmatch(name.removeprefix("/")):
        raise ValueError(f"update_info: shared_memory is {shown(name)}; it must be a name, without slashes")
    return SHARED_MEMORY_FOLDER / name.removeprefix("/")


def _descriptor(given: Any) -> Path:
    """Memory without a name: of a process of this machine and this user, the kernel sees to that."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise ValueError(f"update_info: descriptor is {shown(given)}; it must be a process's id and a file descriptor")
    pid, number = (whole_number("update_info: descriptor", one, 0, 2**31) for one in given)
    return Path(f"/proc/{pid}/fd/{number}")
