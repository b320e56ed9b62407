"""Facts about the hardware. `current_platform(device)` is the way in; torch is imported only there."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.platforms.base import Platform

__all__ = ["current_platform"]


def current_platform(device: str = "auto", cpu_threads: int | None = None, cpu_pin: bool = True) -> "Platform":
    """The platform behind a device name: "auto" takes CUDA where there is one, else the CPU."""
    import torch

    from quire.platforms.cpu import CpuPlatform
    from quire.platforms.cuda import CudaPlatform

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CpuPlatform(cpu_threads, cpu_pin)
    if kind == "cuda":
        return CudaPlatform(device)
    raise ValueError(f"unknown device {device!r}; allowed: auto, cpu, cuda")
