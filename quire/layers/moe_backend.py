"""The choice of kernels for a mixture of experts."""

import functools
import logging
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from quire.kernels.moe_table import MAX_EXPERTS
from quire.kernels.native import moe as native_moe

logger = logging.getLogger("quire")

BackendName = Literal["triton", "native", "torch"]
MOE_BACKENDS = ("auto", *get_args(BackendName))


@dataclass(frozen=True)
class MoeBackend:
    name: BackendName
    why: str

    @property
    def fuses_layer(self) -> bool:
        """Norm, router, experts and residual of few rows can be fused."""
        return self.name == "triton"

    @property
    def packs_weights(self) -> bool:
        return self.name == "native"


@functools.cache
def choose_moe_backend(device_type: str, dtype: torch.dtype, num_experts: int, requested: str = "auto") -> MoeBackend:
    """`requested` is the user's choice; a ValueError if it cannot run here."""
    if requested not in MOE_BACKENDS:
        raise ValueError(f"moe_backend is {requested!r}, but must be one of {', '.join(MOE_BACKENDS)}")
    reasons = {
        "triton": _why_not_triton(device_type, num_experts),
        "native": _why_not_native(device_type, dtype),
        "torch": None,
    }
    if requested != "auto":
        if reasons[requested] is not None:
            raise ValueError(f"moe_backend {requested} cannot be used: {reasons[requested]}")
        chosen = MoeBackend(requested, "it was requested")  # type: ignore[arg-type]
    elif reasons["triton"] is None:
        chosen = MoeBackend("triton", "experts are on a GPU")
    elif reasons["native"] is None:
        chosen = MoeBackend("native", "experts are bf16 on a CPU, which packs them for its own products")
    else:
        reason = reasons["native"] if device_type == "cpu" else reasons["triton"]
        chosen = MoeBackend("torch", f"no other serves them: {reason}")
    logger.debug("mixture of experts by %s: %s", chosen.name, chosen.why)
    return chosen


def _why_not_triton(device_type: str, num_experts: int) -> str | None:
    if device_type != "cuda":
        return f"Triton needs a GPU, and the model is on the {device_type}"
    if num_experts > MAX_EXPERTS:
        return f"the kernels sort up to {MAX_EXPERTS} experts, and there are {num_experts}"
    return None


def _why_not_native(device_type: str, dtype: torch.dtype) -> str | None:
    if device_type != "cpu":
        return f"the C kernels need a CPU, and the model is on {device_type}"
    if dtype is not torch.bfloat16:
        return f"the C kernels multiply bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not native_moe.can_serve():
        return "the C kernels could not be compiled"
    return None
