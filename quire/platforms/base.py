"""The interface to the hardware that Quire runs on."""

from typing import Protocol

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Platform(Protocol):
    name: str
    device: torch.device
    supports_triton: bool  # our Triton kernels run on it
    supports_native: bool  # our C kernels do
    has_own_memory: bool  # separate from the host's; its use by steps is measured
    launches_async: bool  # an operation returns before the device has done it
    default_max_num_seqs: int
    default_max_num_batched_tokens: int
    short_step_tokens: int  # see SchedulerConfig; of models that pool

    def prepare(self) -> list[str]:
        """Set the process up, before the first tensor operation. Returns notes to log."""
        ...

    def cores_to_pin(self) -> list[int]:
        """A CPU for each thread that computes, once weights are loaded; empty where threads are left to the kernel."""
        ...

    def default_dtype(self, model_dtype: str | None) -> torch.dtype:
        """The precision to compute in for a checkpoint stored in `model_dtype` (None: quantized or unknown)."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """ValueError if the platform cannot compute in `dtype`."""
        ...

    def check_fp8_cache(self, kv_cache_dtype: str) -> None:
        """ValueError, which names the setting, if the platform cannot keep keys and values in fp8."""
        ...

    def available_memory(self) -> int:
        """Bytes that could be allocated on the device now."""
        ...
