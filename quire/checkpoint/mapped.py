"""Memory-maps files as tensors, and copies them into parameters."""

import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

CAST_ELEMENTS = 4 * 1024 * 1024

READ_BYTES = 16 << 20


def read_ahead(files: Iterable[Path], wait: bool = False) -> None:
    """Start reading files into the page cache in the background: initializing a GPU takes seconds meanwhile. Or `wait`
    until they have been read."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while wait and file.read(READ_BYTES):
                pass
            if not wait and hasattr(os, "posix_fadvise"):
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
            f"Tensor {name} of the checkpoint has shape {shape} but the model expects {tuple(out.shape)}; "
            "config.json and weights do not belong together"
        )


def copy_into(name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Copy a mapped tensor into `out`, a view of its shape in any type on any device."""
    check_shape(name, tuple(stored.shape), out)
    if stored.dtype is torch.float8_e8m0fnu and out.dtype is torch.uint8:
        stored = stored.view(torch.uint8)  # its exponents, as other checkpoints store them
    if (out.dtype.itemsize == 1 or not out.dtype.is_floating_point) and not _holds(out.dtype, stored):
        raise ValueError(
            f"Tensor {name} of the checkpoint has numbers of {stored.dtype} that {out.dtype} does not hold; allowed: "
            f"those of {out.dtype}"
        )
    if out.device.type == "cpu" or out.dtype == stored.dtype or stored.dim() < 2:
        out.copy_(stored)
        return
    # In slices: casting while copying to another device makes a temporary copy.
    rows = max(1, CAST_ELEMENTS * len(stored) // max(1, stored.numel()))
    for start in range(0, len(stored), rows):
        out[start : start + rows].copy_(stored[start : start + rows])


def _holds(dtype: torch.dtype, stored: torch.Tensor) -> bool:
    """Whether an integer or fp8 type holds all numbers. Of other integers of its size an integer has the bits."""
    from_float = stored.dtype.is_floating_point
    if stored.dtype == dtype or not (from_float or dtype.is_floating_point or stored.dtype.itemsize > dtype.itemsize):
        return True
    wide = stored.to(torch.float64 if from_float else torch.int64)
    return torch.equal(wide.to(dtype).to(wide.dtype), wide)
