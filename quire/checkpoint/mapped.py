"""A file's bytes as a tensor, and what every tensor of a checkpoint checks before it is read."""

import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

CAST_ELEMENTS = 4 * 1024 * 1024


def read_ahead(files: Iterable[Path]) -> None:
    """Ask the system to bring files into memory while something else goes on: a GPU takes seconds to wake up."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def map_bytes(path: Path) -> torch.Tensor:
    """The whole file as a uint8 tensor backed by the page cache; it must never be written to."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def check_shape(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(
            f"Tensor {name} of the checkpoint has shape {shape} but the model has room for {tuple(out.shape)}; "
            "config.json and weights do not belong together"
        )


def copy_into(name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a mapped tensor into `out`, a view of its shape in any type on any device."""
    check_shape(name, tuple(stored.shape), out)
    if out.device.type == "cpu" or out.dtype == stored.dtype or stored.dim() < 2:
        out.copy_(stored)
        return
    # A cast on the way to another device would make a temporary of the whole tensor.
    rows = max(1, CAST_ELEMENTS * len(stored) // max(1, stored.numel()))
    for start in range(0, len(stored), rows):
        out[start : start + rows].copy_(stored[start : start + rows])
