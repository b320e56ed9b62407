"""Which attention kernels a KV-cache group uses, and why."""

import torch

from quire.attention.base import AttentionBackend
from quire.attention.cpu import TorchBackend
from quire.platforms.base import Platform

BACKENDS = ("torch",)


def choose_backend(
    platform: Platform, dtype: torch.dtype, head_size: int, requested: str | None = None
) -> tuple[AttentionBackend, str]:
    """The backend and one sentence that says why it was chosen."""
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; allowed: {', '.join(BACKENDS)}")
    name = str(dtype).removeprefix("torch.")
    why = "it was asked for" if requested else f"it serves {platform.name}, {name} and head size {head_size}"
    return TorchBackend(), f"attention backend torch: {why}."
