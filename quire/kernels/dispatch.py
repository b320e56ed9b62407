"""Where an operation runs: as a Triton kernel or as its torch reference."""

import functools

import torch

from quire.config.environment import TRITON_INTERPRET

# Triton's interpreter runs kernels on CPU tensors; tests compare them with the torch references that way.
INTERPRETED = TRITON_INTERPRET.get()


def use_triton(x: torch.Tensor) -> bool:
    return x.is_cuda or INTERPRETED


def supports_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on the device itself, not interpreted."""
    return device.type == "cuda"


def early_launch(x: torch.Tensor) -> dict[str, bool]:
    """Launch arguments with which a kernel may start while the one before still runs (programmatic dependent launch).

    Such a kernel waits (gdc_wait) before it touches anything that another kernel writes or reads; only what does not
    change, such as weights, may be loaded before. In a decode step this hides a microsecond per kernel.
    """
    if x.is_cuda and _has_early_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _has_early_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9
