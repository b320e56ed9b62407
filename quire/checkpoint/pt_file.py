"""Tensors of PyTorch .bin files: pickles, read only by torch's restricted loader, which runs no code."""

import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from quire.checkpoint.mapped import copy_into

ZIP_MAGIC = b"PK\x03\x04"


class PtTensor:
    """One tensor; its values stay in the file until `read_into`."""

    def __init__(self, name: str, stored: torch.Tensor):
        self.name = name
        self.shape = tuple(stored.shape)
        self.nbytes = stored.nbytes
        self.stored = stored

    def read_into(self, out: torch.Tensor) -> None:
        """Copy into `out`, a view of this tensor's shape in any type on any device."""
        copy_into(self.name, self.stored, out)

    def read_part(self, out: torch.Tensor, dim: int, start: int) -> None:
        """Copy what begins at `start` along `dim` into `out`."""
        copy_into(self.name, self.stored.narrow(dim, start, out.shape[dim]), out)


def open_pt(files: tuple[Path, ...], copies: bool = False) -> Iterator[PtTensor]:
    """All tensors, shard by shard. `copies`: of copies of the files. The process would end if one that is mapped were
    cut short, as by a trainer that saves anew."""
    homes: dict[str, Path] = {}
    for file in files:
        for name, stored in _load(file, copies).items():
            if name in homes:
                raise ValueError(
                    f"Tensor {name} is in both {homes[name]} and {file}; remove the file that does not belong"
                )
            homes[name] = file
            yield PtTensor(name, stored)


def _load(file: Path, copies: bool) -> dict[str, torch.Tensor]:
    try:
        with _copy_of(file) if copies else nullcontext(file) as source:
            # Files from before torch 1.6 are no zip archives and cannot be memory-mapped: such a shard is read whole.
            with source.open("rb") as stream:
                mapped = stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is refused: it is damaged, or a pickle that asks for more than tensors, which could run code "
            f"({_reason(error)}). Use the model's safetensors, or convert the file where you trust it."
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{file} is corrupt or truncated ({_reason(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not the tensors of a model by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ValueError(f"{file}: {name!r} is a {type(value).__name__}, not a dense tensor; this is no checkpoint")
    return content


@contextmanager
def _copy_of(file: Path) -> Iterator[Path]:
    """Removed at the end; what is mapped of it stays."""
    with file.open("rb") as stream, tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)


def _reason(error: Exception) -> str:
    """The line of torch's long message that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "nsupported" in line] or lines or [type(error).__name__]
    return telling[0][:200]
