"""Which attention kernels a model uses, and why."""

from dataclasses import dataclass

import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import TorchBackend
from quire.platforms.base import Platform

BACKENDS = ("torch", "triton")


@dataclass(frozen=True)
class AttentionShape:
    max_rows: int
    num_heads: int
    num_kv_heads: int
    head_size: int


def choose_backend(
    platform: Platform, dtype: torch.dtype, shape: AttentionShape, requested: str | None = None
) -> tuple[AttentionBackend, str]:
    """The backend and one sentence that says why it was chosen."""
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; allowed: {', '.join(BACKENDS)}")
    if requested == "triton" and platform.name == "cpu":
        raise ValueError("attention backend 'triton' needs a GPU; allowed on a CPU: torch")
    name = requested or ("torch" if platform.name == "cpu" else "triton")
    served = f"{platform.name}, {str(dtype).removeprefix('torch.')} and head size {shape.head_size}"
    why = f"attention backend {name}: {'it was asked for' if requested else f'it serves {served}'}."
    if name == "torch":
        return TorchBackend(), why
    from quire.attention.triton import TritonBackend

    heads = (shape.num_heads, shape.num_kv_heads, shape.head_size)
    return TritonBackend(shape.max_rows, *heads, dtype, platform.device), why
