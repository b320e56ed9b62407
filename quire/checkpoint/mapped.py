"""A file's bytes as a tensor, and what every tensor of a checkpoint checks before it is read."""

import mmap
import warnings
from pathlib import Path

import torch


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
