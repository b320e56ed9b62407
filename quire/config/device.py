"""Options of the hardware and its kernels."""

from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class DeviceConfig:
    """The hardware."""

    device: str = option("auto", "where to run", choices=("auto", "cpu", "cuda"))
    attention_backend: str | None = option(None, "attention kernels; default: the best for the platform")
    moe_backend: str = option("auto", "kernels of mixtures of experts", choices=("auto", "triton", "native", "torch"))
    enforce_eager: bool = option(False, "on a GPU: launch every kernel by itself, without CUDA graphs")
    cpu_threads: int | None = option(
        None, "on a CPU: threads that compute; default: the physical cores this process may use", minimum=1
    )
    cpu_pin: bool = option(True, "on a CPU: bind those threads to their cores, if they fill all of them")

    def __post_init__(self) -> None:
        validate(self)
