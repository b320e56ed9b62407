"""Facts about the hardware. `current_platform(device)` is the way in; torch is imported only there."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.platforms.base import Platform
    from quire.platforms.cpu import CpuPlatform
    from quire.platforms.cuda import CudaPlatform

__all__ = ["current_platform", "platform_class"]


def platform_class(device: str) -> "type[CpuPlatform | CudaPlatform]":
    """Its attributes say what any device of this kind can do: "auto" is CUDA where there is one, else the CPU."""
    import torch

    from quire.platforms.cpu import CpuPlatform
    from quire.platforms.cuda import CudaPlatform

    if device == "auto":
        return CudaPlatform if torch.cuda.is_available() else CpuPlatform
    kinds = {kind.name: kind for kind in (CpuPlatform, CudaPlatform)}
    name = device.partition(":")[0]
    if name not in kinds:
        raise ValueError(f"unknown device {device!r}; allowed: auto, cpu, cuda")
    return kinds[name]


def current_platform(
    device: str = "auto", cpu_threads: int | None = None, cpu_pin: bool = True, number: int = 0
) -> "Platform":
    """The platform of a device name, as in `platform_class`, and the number of the GPU."""
    from quire.platforms.cpu import CpuPlatform
    from quire.platforms.cuda import CudaPlatform

    if platform_class(device) is CpuPlatform:
        return CpuPlatform(cpu_threads, cpu_pin)
    return CudaPlatform(f"cuda:{number}" if device in ("auto", "cuda") else device)
